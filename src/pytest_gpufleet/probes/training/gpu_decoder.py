"""Photos that nvJPEG decodes on the GPU: loader processes only read the files, and the GPU crops, resizes and flips."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.world.rank import Rank

# Defaults of torchvision's RandomResizedCrop, which crops where the host decodes: the part of a photo's area that is
# taken, and width / height of that part.
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
AHEAD = 2  # batches that are decoded before they are asked for
COMPARED = 16  # photos
# Mean difference of two decoders in levels of 255: they round the inverse DCT differently, and interpolate colours that
# stand for two by two pixels, or repeat them. torchvision's test of the same two asks for less than 2
# (test_decode_jpegs_cuda in its test/test_image.py); a wrong transform, or wrong data, is tens off.
DECODED_ALIKE = 2.0

Crop = tuple[int, int, int, int]  # left, top, right and bottom, in pixels


class Encoded(NamedTuple):
    """A batch of photos as they stand in their files, one file behind the other, and what is to become of each."""

    files: Tensor  # bytes
    lengths: Tensor  # of each file
    boxes: Tensor  # the crop of each: left, top, right and bottom, in pixels
    flipped: Tensor
    labels: Tensor


def encoded_photos(folder: str) -> Dataset[Any]:
    """The photos in `folder`, which are all of one size, as read_photo gives them, with their labels."""
    from torchvision.datasets import ImageFolder

    width, height = Image.open(next(Path(folder).rglob("*.jpg"))).size
    photos: Dataset[Any] = ImageFolder(folder, loader=partial(read_photo, torch.empty(3, height, width, device="meta")))
    return photos


def read_photo(like: Tensor, path: str) -> tuple[Tensor, Crop, bool]:
    """The bytes of a file, and at random a crop of a photo as large as `like` and whether to flip it: all that a loader
    process does."""
    from torchvision.transforms import RandomResizedCrop

    top, left, height, width = RandomResizedCrop.get_params(like, AREA, RATIO)
    return bytes_of(path), (left, top, left + width, top + height), bool(torch.rand(()) < 0.5)


def collated(photos: Sequence[tuple[tuple[Tensor, Crop, bool], int]]) -> Encoded:
    """As one tensor of bytes: each tensor that a loader process hands over costs a file of shared memory."""
    files, boxes, flipped = zip(*(photo for photo, _ in photos), strict=True)
    labels = torch.tensor([label for _, label in photos])
    lengths = torch.tensor([len(each) for each in files])
    return Encoded(torch.cat(files), lengths, torch.tensor(boxes, dtype=torch.float32), torch.tensor(flipped), labels)


def decoded(files: Sequence[Tensor], device: torch.device) -> Tensor:
    """Photos of one size as bytes (photos, 3, height, width): by nvJPEG on a GPU, by libjpeg on the host."""
    from torchvision.io import ImageReadMode, decode_jpeg

    if device.type == "cuda":
        # torchvision up to 0.29 lets nvJPEG write into its new tensors before what is queued on this stream has read
        # those that had this memory before (pytorch/vision#9606).
        torch.cuda.current_stream(device).synchronize()
    return torch.stack(decode_jpeg(list(files), ImageReadMode.RGB, device=device))


def cropped(photos: Tensor, boxes: Tensor, flipped: Tensor, pixels: int) -> Tensor:
    """The box of each photo, resized to a square of `pixels` and flipped from left to right where asked: float32.

    roi_align does so for all photos at once. It averages as many points as the box has pixels for each of the result,
    which is the antialiasing that PIL does on the host.
    """
    from torchvision.ops import roi_align

    number = torch.arange(len(photos), dtype=boxes.dtype, device=photos.device)
    images: Tensor = roi_align(photos.float(), torch.cat([number[:, None], boxes], 1), pixels, aligned=True)
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


def decoded_batches(rank: Rank, loader: DataLoader[Encoded], pixels: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's batches as float32 images of 0 to 255, with their labels, on the rank's GPU.

    A thread decodes the next ones on a stream of its own meanwhile: decode_jpeg returns when it is done.
    """
    encoded = iter(loader)  # forks the loader processes: not from a thread
    stream = torch.cuda.Stream(rank.device)  # type: ignore[no-untyped-call]

    def following() -> tuple[Tensor, Tensor, torch.cuda.Event]:
        batch: Encoded = next(encoded)
        with torch.cuda.stream(stream):
            files = torch.split(batch.files, batch.lengths.tolist())
            photos = decoded(files, rank.device)
            boxes, flipped, labels = (
                each.to(rank.device, non_blocking=True) for each in (batch.boxes, batch.flipped, batch.labels)
            )
            return cropped(photos, boxes, flipped, pixels), labels, stream.record_event()

    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(following) for _ in range(AHEAD))
        while True:
            waiting.append(thread.submit(following))
            images, labels, ready = waiting.popleft().result()
            training = torch.cuda.current_stream(rank.device)
            training.wait_event(ready)
            for each in (images, labels):
                each.record_stream(training)  # its memory is free for the next batch when this stream has read it
            yield images, labels


def why_not(device: torch.device, folder: str) -> str:
    """Why photos are not decoded by nvJPEG here; empty if they are."""
    if device.type != "cuda":
        return "there is no GPU"
    try:
        decoded(_some_files(folder, 1), device)
    except (ImportError, RuntimeError) as error:  # torchvision without it, or one before 0.20, which takes no lists
        return str(error).partition("\n")[0]
    return ""


def decoder_difference(rank: Rank, folder: str) -> float | None:
    """By how many levels of 255 this GPU decodes photos of `folder` otherwise than the host, on average over the pixels
    of the photo that differs most; None where nvJPEG is not there."""
    if why_not(rank.device, folder):
        return None
    files = _some_files(folder, COMPARED)
    here, on_host = (decoded(files, device).cpu().float() for device in (rank.device, torch.device("cpu")))
    return float((here - on_host).abs().mean((1, 2, 3)).max())


def wrongly_decoded(differences: Mapping[Where, float | None]) -> list[Fault]:
    """A fault for each GPU that decodes otherwise than the host, or not at all while others do: its
    `decoder_difference` by its place. Where none does, torchvision has no nvJPEG."""
    if not any(off is not None for off in differences.values()):
        return []
    what = {
        place: "nvJPEG decodes no photo on it, and does on other GPUs"
        if off is None
        else f"photos decoded by nvJPEG are {off:.1f} levels of 255 off on average"
        for place, off in differences.items()
        if off is None or not off < DECODED_ALIKE
    }
    return [Fault("product_wrong", (place,), told) for place, told in what.items()]


def _some_files(folder: str, count: int) -> list[Tensor]:
    paths = islice(sorted(Path(folder).rglob("*.jpg")), count)
    return [bytes_of(path) for path in paths]


def bytes_of(path: str | Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8))
