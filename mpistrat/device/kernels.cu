// CUDA kernels: pack arrays into buckets and unpack them, sum the buffers of several ranks, and divide sums.
//
// Invariant: no barrier, no shared memory, no header. Every thread works independently, so that the same source compiles as C++
// and runs thread after thread on a host, where the tests compare it with NumPy.
//
// Memory is moved in packets if both sides are aligned to 16 bytes, and element by element if they are not. A packet has 16 bytes
// on the wider side, so that neighbouring threads write neighbouring bytes. (With 16 bytes on the narrower side, a thread that
// casts bfloat16 to float32 writes 32 bytes in two halves, and an H100 reaches 0.58 of its copy's bandwidth.)
// Each thread has enough independent packets in flight to read 64 bytes.

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;

constexpr int THREADS = 256;
constexpr int BYTES_UNDER_WAY = 64;

// 16-bit floats are stored as bits, and computed with as float

struct bfloat16 {
    uint16 bits;
};

struct float16 {
    uint16 bits;
};

template <class T> struct Complex {
    T real, imaginary;
    __device__ Complex operator+(Complex other) const { return {T(real + other.real), T(imaginary + other.imaginary)}; }
    __device__ Complex operator*(Complex other) const {
        return {T(real * other.real - imaginary * other.imaginary), T(real * other.imaginary + imaginary * other.real)};
    }
};

__device__ inline uint32 float_bits(float value) {
    union { float value; uint32 bits; } both;
    both.value = value;
    return both.bits;
}

__device__ inline float float_of(uint32 bits) {
    union { uint32 bits; float value; } both;
    both.bits = bits;
    return both.value;
}

template <class T> struct Wide { typedef T type; };
template <> struct Wide<bfloat16> { typedef float type; };
template <> struct Wide<float16> { typedef float type; };

template <class T> __device__ inline typename Wide<T>::type widen(T value) { return value; }
template <> __device__ inline float widen<bfloat16>(bfloat16 value) { return float_of(uint32(value.bits) << 16); }

template <class T> __device__ inline T narrow(typename Wide<T>::type value) { return value; }

template <> __device__ inline bfloat16 narrow<bfloat16>(float value) {
    uint32 bits = float_bits(value);
    bfloat16 result;
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        result.bits = uint16((bits >> 16 & 0x8000u) | 0x7fc0u);  // a NaN must not round to infinity
    else
        result.bits = uint16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);  // to nearest, ties to even
    return result;
}

#ifdef __CUDA_ARCH__
template <> __device__ inline float widen<float16>(float16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

template <> __device__ inline float16 narrow<float16>(float value) {
    float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
#else
template <> __device__ inline float widen<float16>(float16 value) {
    union { uint16 bits; _Float16 value; } both;
    both.bits = value.bits;
    return both.value;
}

template <> __device__ inline float16 narrow<float16>(float value) {
    union { _Float16 value; uint16 bits; } both;
    both.value = _Float16(value);
    float16 result;
    result.bits = both.bits;
    return result;
}
#endif

template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Packet { T items[N]; };

// elements per packet, and packets per thread, if A is read and B is written
template <class A, class B> struct Shape {
    static constexpr int WIDER = int(sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));
    static constexpr int PER_PACKET = WIDER < 16 ? 16 / WIDER : 1;
    static constexpr int UNROLL = BYTES_UNDER_WAY / (PER_PACKET * int(sizeof(A)));
};

__device__ inline bool is_aligned(const void* address) { return (uint64(address) & 15) == 0; }

// Several arrays in one launch. Segment s is cut into tiles of THREADS * UNROLL packets; first_tile[s] counts the tiles of the
// segments before it, and block b does tile b.

struct Segment {
    uint64 source, target, count;
};

template <class S, class D, class W> __device__ inline D converted(S value, W divisor) {
    typename Wide<S>::type wide = widen<S>(value);
    return narrow<D>(typename Wide<D>::type(divisor == W(1) ? wide : typename Wide<S>::type(wide / divisor)));
}

// Copy every segment from source to target, cast from S to D, and divide; the divisor has the type in which S is computed.
template <class S, class D>
__global__ void move_segments(const Segment* segments, const uint32* first_tile, int num_segments,
                              typename Wide<S>::type divisor) {
    constexpr int PER_PACKET = Shape<S, D>::PER_PACKET, UNROLL = Shape<S, D>::UNROLL;
    typedef Packet<S, PER_PACKET> From;
    typedef Packet<D, PER_PACKET> To;
    int low = 0, high = num_segments - 1;
    while (low < high) {  // the last segment whose first tile is not after this block
        int middle = (low + high + 1) / 2;
        if (first_tile[middle] <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const Segment segment = segments[low];
    const uint64 start = uint64(blockIdx.x - first_tile[low]) * (THREADS * UNROLL * PER_PACKET);
    const S* source = reinterpret_cast<const S*>(segment.source) + start;
    D* target = reinterpret_cast<D*>(segment.target) + start;
    const uint64 rest = segment.count - start;
    const uint64 count = rest < uint64(THREADS * UNROLL * PER_PACKET) ? rest : uint64(THREADS * UNROLL * PER_PACKET);
    uint64 packed = 0;
    if (is_aligned(source) && is_aligned(target)) {
        const uint64 packets = count / PER_PACKET;
        packed = packets * PER_PACKET;
        if (packets == THREADS * UNROLL) {
            From held[UNROLL];
#pragma unroll
            for (int turn = 0; turn < UNROLL; ++turn)
                held[turn] = reinterpret_cast<const From*>(source)[threadIdx.x + turn * THREADS];
#pragma unroll
            for (int turn = 0; turn < UNROLL; ++turn) {
                To made;
#pragma unroll
                for (int item = 0; item < PER_PACKET; ++item)
                    made.items[item] = converted<S, D>(held[turn].items[item], divisor);
                reinterpret_cast<To*>(target)[threadIdx.x + turn * THREADS] = made;
            }
            return;
        }
        for (uint64 packet = threadIdx.x; packet < packets; packet += THREADS) {
            From held = reinterpret_cast<const From*>(source)[packet];
            To made;
#pragma unroll
            for (int item = 0; item < PER_PACKET; ++item) made.items[item] = converted<S, D>(held.items[item], divisor);
            reinterpret_cast<To*>(target)[packet] = made;
        }
    }
    for (uint64 item = packed + threadIdx.x; item < count; item += THREADS)
        target[item] = converted<S, D>(source[item], divisor);
}

// One pass over the same range of every rank's buffer; running sums stay in registers.

struct Sum {
    template <class W> static __device__ inline W fold(W a, W b) { return a + b; }
};

struct Prod {
    template <class W> static __device__ inline W fold(W a, W b) { return a * b; }
};

// a NaN wins, as in NumPy
struct Min {
    template <class W> static __device__ inline W fold(W a, W b) { return a != a || a < b ? a : b; }
};

struct Max {
    template <class W> static __device__ inline W fold(W a, W b) { return a != a || a > b ? a : b; }
};

// `peers` holds the address of each rank's arena; the range begins `first_byte` bytes behind it. The result is written to
// `target`, which may be this rank's own range. Sums begin with the arena of `first_peer`, then comes the next one, and so on
// round: ranks that begin with others read different GPUs.
template <class T, class Op>
__global__ void fold_peers(const uint64* peers, int num_peers, uint64 first_byte, T* target, uint64 count, int first_peer) {
    constexpr int PER_PACKET = sizeof(T) < 16 ? 16 / int(sizeof(T)) : 1;
    typedef typename Wide<T>::type W;
    typedef Packet<T, PER_PACKET> Few;
    const uint64 stride = uint64(gridDim.x) * THREADS, thread = uint64(blockIdx.x) * THREADS + threadIdx.x;
    bool aligned = is_aligned(target);
    for (int peer = 0; peer < num_peers; ++peer)
        aligned = aligned && is_aligned(reinterpret_cast<const T*>(peers[peer] + first_byte));
    const uint64 packets = aligned ? count / PER_PACKET : 0;
    for (uint64 packet = thread; packet < packets; packet += stride) {
        W total[PER_PACKET];
        int peer = first_peer;
        Few held = reinterpret_cast<const Few*>(peers[peer] + first_byte)[packet];
#pragma unroll
        for (int item = 0; item < PER_PACKET; ++item) total[item] = widen<T>(held.items[item]);
        for (int others = 1; others < num_peers; ++others) {
            peer = peer + 1 < num_peers ? peer + 1 : 0;
            held = reinterpret_cast<const Few*>(peers[peer] + first_byte)[packet];
#pragma unroll
            for (int item = 0; item < PER_PACKET; ++item) total[item] = Op::fold(total[item], widen<T>(held.items[item]));
        }
#pragma unroll
        for (int item = 0; item < PER_PACKET; ++item) held.items[item] = narrow<T>(total[item]);
        reinterpret_cast<Few*>(target)[packet] = held;
    }
    for (uint64 item = packets * PER_PACKET + thread; item < count; item += stride) {
        int peer = first_peer;
        W total = widen<T>(reinterpret_cast<const T*>(peers[peer] + first_byte)[item]);
        for (int others = 1; others < num_peers; ++others) {
            peer = peer + 1 < num_peers ? peer + 1 : 0;
            total = Op::fold(total, widen<T>(reinterpret_cast<const T*>(peers[peer] + first_byte)[item]));
        }
        target[item] = narrow<T>(total);
    }
}

// Divide values in place, once, at the end of a mean.
template <class T> __global__ void divide_values(T* values, uint64 count, typename Wide<T>::type divisor) {
    constexpr int PER_PACKET = sizeof(T) < 16 ? 16 / int(sizeof(T)) : 1;
    typedef Packet<T, PER_PACKET> Few;
    const uint64 stride = uint64(gridDim.x) * THREADS, thread = uint64(blockIdx.x) * THREADS + threadIdx.x;
    const uint64 packets = is_aligned(values) ? count / PER_PACKET : 0;
    for (uint64 packet = thread; packet < packets; packet += stride) {
        Few held = reinterpret_cast<Few*>(values)[packet];
#pragma unroll
        for (int item = 0; item < PER_PACKET; ++item) held.items[item] = converted<T, T>(held.items[item], divisor);
        reinterpret_cast<Few*>(values)[packet] = held;
    }
    for (uint64 item = packets * PER_PACKET + thread; item < count; item += stride)
        values[item] = converted<T, T>(values[item], divisor);
}

// Combine the array that another rank has sent with `target`, in place.
template <class T, class Op>
__global__ void fold_into(T* target, const T* arrived, uint64 count) {
    constexpr int PER_PACKET = sizeof(T) < 16 ? 16 / int(sizeof(T)) : 1;
    typedef Packet<T, PER_PACKET> Few;
    const uint64 stride = uint64(gridDim.x) * THREADS, thread = uint64(blockIdx.x) * THREADS + threadIdx.x;
    const uint64 packets = is_aligned(target) && is_aligned(arrived) ? count / PER_PACKET : 0;
    for (uint64 packet = thread; packet < packets; packet += stride) {
        Few mine = reinterpret_cast<const Few*>(target)[packet];
        const Few other = reinterpret_cast<const Few*>(arrived)[packet];
#pragma unroll
        for (int item = 0; item < PER_PACKET; ++item)
            mine.items[item] = narrow<T>(Op::fold(widen<T>(mine.items[item]), widen<T>(other.items[item])));
        reinterpret_cast<Few*>(target)[packet] = mine;
    }
    for (uint64 item = packets * PER_PACKET + thread; item < count; item += stride)
        target[item] = narrow<T>(Op::fold(widen<T>(target[item]), widen<T>(arrived[item])));
}
