"""One side of a two-way stream over TCP: prints the bits of payload it received per second.

Arguments: ``listen`` or ``connect``, the listening host, and for how many seconds.
"""

import socket
import sys
import threading
import time

PORT, BLOCK_BYTES, WARM_UP_SECONDS = 7531, 1 << 20, 0.5


def connection(role: str, host: str) -> socket.socket:
    if role == "listen":
        with socket.create_server((host, PORT)) as server:
            return server.accept()[0]
    for _ in range(500):
        try:
            return socket.create_connection((host, PORT))
        except OSError:
            time.sleep(0.02)
    raise SystemExit(f"nobody listens on {host}:{PORT}")


def send(stream: socket.socket, seconds: float) -> None:
    """Send for a while, then say that nothing more follows."""
    block, end = bytes(BLOCK_BYTES), time.perf_counter() + seconds
    while time.perf_counter() < end:
        stream.sendall(block)
    stream.shutdown(socket.SHUT_WR)


def receive(stream: socket.socket, seconds: float) -> float:
    """Return the bits per second that arrive between the warm-up and the time that the other side stops."""
    block, start = bytearray(BLOCK_BYTES), time.perf_counter()
    received, first, last = 0, 0.0, 0.0
    while count := stream.recv_into(block):
        last = time.perf_counter()
        if last - start < WARM_UP_SECONDS:
            first = last
        elif last - start < seconds:
            received += count
        else:
            continue
        counted_until = last
    return received * 8 / (counted_until - first)


if __name__ == "__main__":
    role, host, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with connection(role, host) as stream:
        sender = threading.Thread(target=send, args=(stream, seconds))
        sender.start()
        print(receive(stream, seconds))
        sender.join()
