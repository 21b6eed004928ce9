"""Shapes of the gradients of a network, written down from its definition."""


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


def _convolution(outputs: int, inputs: int, size: int) -> list[tuple[int, ...]]:
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]
