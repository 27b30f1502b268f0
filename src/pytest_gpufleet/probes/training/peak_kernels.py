"""Triton kernels of BatchNorm, ReLU, residual add and max pooling, for 16-bit activations in channels_last.

Activations are matrices here: a row for each pixel of each image, a column for each channel. A tile is BLOCK_ROWS rows
of BLOCK_CHANNELS channels: 128 bytes in a row, so that every thread reads and writes 16 bytes at once. All sums are in
float32. The number of channels is a multiple of BLOCK_CHANNELS. NaN goes through ReLU and pooling, as with torch's own.
"""

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's names for what is known when it compiles

import triton
import triton.language as tl


@triton.jit
def _place(channels, BLOCK_CHANNELS: tl.constexpr):
    """Which row of tiles this program works on, of how many, and its channels. Neighbours read the same rows."""
    columns = channels // BLOCK_CHANNELS
    column = tl.program_id(0) % columns * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return tl.program_id(0) // columns, tl.num_programs(0) // columns, column


@triton.jit
def _tile(row_of_tiles, column, rows, channels, BLOCK_ROWS: tl.constexpr):
    row = row_of_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row[:, None] * channels + column[None, :], (row < rows)[:, None]


@triton.jit
def sums(x, partial, rows, channels, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Of each channel, the sum and the sum of squares of the rows of this program."""
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    square = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    mine, programs, column = _place(channels, BLOCK_CHANNELS)
    for tile in tl.range(mine, tl.cdiv(rows, BLOCK_ROWS), programs, num_stages=3):
        at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        total += value
        square += value * value
    _store_sums(partial, mine, column, total, square, channels)


@triton.jit
def _store_sums(partial, part, column, first, second, channels):
    at = partial + part * 2 * channels + column
    tl.store(at, tl.sum(first, 0))
    tl.store(at + channels, tl.sum(second, 0))


@triton.jit
def _added_up(partial, parts, channels, BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    first = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], tl.float32)
    second = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        at = part[:, None] * 2 * channels + column[None, :]
        there = (part < parts)[:, None]
        first += tl.load(partial + at, mask=there, other=0.0)
        second += tl.load(partial + at + channels, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0), column


@triton.jit
def statistics(
    partial, weight, bias, running_mean, running_var, about, parts, rows, channels, eps, momentum,
    BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """What normalises each channel. `about`: rows of scale, shift, mean and 1 / standard deviation."""
    total, square, column = _added_up(partial, parts, channels, BLOCK_PARTS, BLOCK_CHANNELS)
    mean = total / rows
    variance = square / rows - mean * mean
    variance = tl.where(variance < 0, 0.0, variance)
    inverse = 1 / tl.sqrt(variance + eps)
    scale = tl.load(weight + column) * inverse
    tl.store(about + column, scale)
    tl.store(about + channels + column, tl.load(bias + column) - mean * scale)
    tl.store(about + 2 * channels + column, mean)
    tl.store(about + 3 * channels + column, inverse)
    old_mean, old_var = tl.load(running_mean + column), tl.load(running_var + column)
    tl.store(running_mean + column, old_mean + momentum * (mean - old_mean))
    tl.store(running_var + column, old_var + momentum * (variance * (rows / (rows - 1)) - old_var))


@triton.jit
def normalise(
    x, identity, about, out, rows, channels,
    ADD: tl.constexpr, RELU: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """x * scale + shift, what is to be added to it, and ReLU."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    scale, shift = tl.load(about + column)[None, :], tl.load(about + channels + column)[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * scale + shift
    if ADD:
        value += tl.load(identity + at, mask=there, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def gradient_sums(
    gradient, second, x, out, about, merged, partial, rows, channels,
    RELU: tl.constexpr, JUNCTION: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Of each channel, the sum of the gradient behind ReLU and of its product with x. RELU: x alone decides what goes
    through. JUNCTION: something was added before, so `out` decides; the gradient, if SECOND of two, is `merged`."""
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    product = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    mine, programs, column = _place(channels, BLOCK_CHANNELS)
    if RELU:
        scale, shift = tl.load(about + column)[None, :], tl.load(about + channels + column)[None, :]
    for tile in tl.range(mine, tl.cdiv(rows, BLOCK_ROWS), programs, num_stages=3):
        at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        slope = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
        if RELU:
            slope = tl.where(value * scale + shift > 0, slope, 0.0)
        if JUNCTION:
            if SECOND:
                slope += tl.load(second + at, mask=there, other=0.0).to(tl.float32)
            through = tl.load(out + at, mask=there, other=0.0)
            slope = tl.where(through > 0, slope, 0.0).to(merged.dtype.element_ty)
            tl.store(merged + at, slope, mask=there)
            slope = slope.to(tl.float32)
        total += slope
        product += slope * value
    _store_sums(partial, mine, column, total, product, channels)


@triton.jit
def coefficients(
    partial, about, of_weight, of_bias, line, parts, rows, channels,
    BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias, and `line`: the gradient of x is scale * gradient + line[0] * x + line[1]."""
    total, product, column = _added_up(partial, parts, channels, BLOCK_PARTS, BLOCK_CHANNELS)
    scale, mean = tl.load(about + column), tl.load(about + 2 * channels + column)
    inverse = tl.load(about + 3 * channels + column)
    weight = (product - mean * total) * inverse
    tl.store(of_weight + column, weight)
    tl.store(of_bias + column, total)
    slope = -scale * inverse * weight / rows
    tl.store(line + column, slope)
    tl.store(line + channels + column, -scale * total / rows - slope * mean)


@triton.jit
def input_gradient(
    gradient, x, about, line, out, rows, channels,
    RELU: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, of that behind ReLU (RELU) or of that of the normalised x."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    scale = tl.load(about + column)[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
    if RELU:
        slope = tl.where(value * scale + tl.load(about + channels + column)[None, :] > 0, slope, 0.0)
    result = slope * scale + value * tl.load(line + column)[None, :] + tl.load(line + channels + column)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def max_pool(x, out, taken, rows, channels, height, width, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """The largest of 3 x 3 pixels in steps of 2, padded by 1; `taken`: which of the nine, the first of equals.
    `height` and `width` of `out`, whose rows these are."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    image, y, z = row // (height * width), row // width % height, row % width
    best = tl.full([BLOCK_ROWS, BLOCK_CHANNELS], float("-inf"), tl.float32)
    which = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.int8)
    for tap in tl.static_range(9):
        above, left = 2 * y - 1 + tap // 3, 2 * z - 1 + tap % 3
        inside = (above >= 0) & (left >= 0) & (above < 2 * height) & (left < 2 * width) & (row < rows)
        pixel = (image * 2 * height + above) * 2 * width + left
        from_x = x + pixel[:, None] * channels + column[None, :]
        value = tl.load(from_x, mask=inside[:, None], other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        which = tl.where(better, tap, which).to(tl.int8)
    tl.store(out + at, best.to(out.dtype.element_ty), mask=there)
    tl.store(taken + at, which, mask=there)


@triton.jit
def max_pool_gradient(
    gradient, second, taken, out, rows, channels, height, width, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr
):
    """The gradient of the pixels that were pooled, whose rows these are: each lies in up to four windows. The gradient
    of what was pooled comes in two parts; `height` and `width` are of that."""
    tile, _, column = _place(channels, BLOCK_CHANNELS)
    at, there = _tile(tile, column, rows, channels, BLOCK_ROWS)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    image, y, z = row // (4 * height * width), row // (2 * width) % (2 * height), row % (2 * width)
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    for window in tl.static_range(4):
        up, across = y // 2 + window // 2, z // 2 + window % 2
        from_up, from_left = y - 2 * up + 1, z - 2 * across + 1  # of this pixel, within the window
        inside = (from_up >= 0) & (from_left >= 0) & (up < height) & (across < width) & (row < rows)
        of = ((image * height + up) * width + across)[:, None] * channels + column[None, :]
        which = tl.load(taken + of, mask=inside[:, None], other=-1)
        value = tl.load(gradient + of, mask=inside[:, None], other=0.0).to(tl.float32)
        value += tl.load(second + of, mask=inside[:, None], other=0.0).to(tl.float32)
        total += tl.where(which == (from_up * 3 + from_left)[:, None], value, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
