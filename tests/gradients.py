"""Shapes of the gradients of two networks, written down from their definitions."""

import math


def resnet50() -> list[tuple[int, ...]]:
    """Return the 161 shapes of ResNet-50 for 1000 classes: 25.6 million numbers, 102 MB of float32.

    He, Zhang, Ren, Sun: Deep residual learning for image recognition (2015), table 1; three convolutions a block, each
    followed by a batch normalisation with a scale and a shift.
    """
    shapes = _convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _convolution(width, inputs, 1) + _convolution(width, width, 3) + _convolution(4 * width, width, 1)
            if block == 0:
                shapes += _convolution(4 * width, inputs, 1)  # the shortcut changes the width
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def transformer(width: int = 768, vocabulary: int = 30522, positions: int = 512, layers: int = 12) -> list[tuple[int, ...]]:
    """Return the 148 shapes of a transformer with 12 layers, as GPT-2 has them; a smaller width and vocabulary scale it.

    Radford and others: Language models are unsupervised multitask learners (2019): two embeddings; in each layer two
    normalisations, the joint projection of queries, keys and values, that of the attention, and two of the network behind;
    a normalisation at the end. Matrices have biases, normalisations a scale and a shift.
    """
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    layer = [
        *norm,
        *((width, 3 * width), (3 * width,)),
        *((width, width), (width,)),
        *norm,
        *((width, 4 * width), (4 * width,)),
        *((4 * width, width), (width,)),
    ]
    return [(vocabulary, width), (positions, width), *(layer * layers), *norm]


def _convolution(outputs: int, inputs: int, size: int) -> list[tuple[int, ...]]:
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]


if __name__ == "__main__":
    for make in (resnet50, transformer):
        shapes = make()
        print(make.__name__, len(shapes), sum(math.prod(shape) for shape in shapes))
