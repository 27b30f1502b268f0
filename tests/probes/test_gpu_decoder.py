"""Photos that nvJPEG decodes: what the host does for it, and that crops on the GPU are those of the host. Here libjpeg
decodes, through the same function of torchvision; tests/gpu/test_resnet50.py has nvJPEG itself."""

import pytest
import torch
from torchvision.transforms.functional import resized_crop

from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.probes.training import gpu_decoder
from pytest_gpufleet.probes.training.loader import PHOTO_HEIGHT, PHOTO_WIDTH, write_photos

CPU = torch.device("cpu")
COUNT = 6
# Mean levels of 255 between roi_align and the resizing that the host's decoder is followed by. Their antialiasing is
# not the same, and the photos have noise: 0.5 to 1.1 for any box. Another box or flip is tens off.
ALIKE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, COUNT)
    return str(folder)


@pytest.fixture(scope="module")
def batch(folder):
    torch.manual_seed(0)
    photos = gpu_decoder.encoded_photos(folder)
    return gpu_decoder.collated([photos[index] for index in range(COUNT)])


def decoded(batch):
    return gpu_decoder.decoded(torch.split(batch.files, batch.lengths.tolist()), CPU)


def test_a_batch_is_the_files_one_behind_the_other(folder, batch):
    genuine = [gpu_decoder.bytes_of(path) for path, _ in gpu_decoder.encoded_photos(folder).samples]
    assert torch.equal(batch.files, torch.cat(genuine))
    assert [len(each) for each in genuine] == batch.lengths.tolist()
    assert decoded(batch).shape == (COUNT, 3, PHOTO_HEIGHT, PHOTO_WIDTH)
    assert batch.labels.tolist() == sorted(batch.labels.tolist())


@pytest.mark.parametrize("pixels", [64, 224])
def test_crops_are_those_of_the_host(batch, pixels):
    photos = decoded(batch)
    cropped = gpu_decoder.cropped(photos, batch.boxes, batch.flipped, pixels)
    assert 0 < sum(batch.flipped) < COUNT
    for photo, box, flipped, image in zip(photos, batch.boxes, batch.flipped, cropped, strict=True):
        left, top, right, bottom = box.int().tolist()
        expected = resized_crop(photo, top, left, bottom - top, right - left, [pixels, pixels], antialias=True).float()
        assert off(image, expected.flip(2) if flipped else expected) < ALIKE
        assert off(image, expected if flipped else expected.flip(2)) > 10 * ALIKE


def off(image, other):
    return float((image - other).abs().mean())


def test_boxes_lie_in_the_photo_and_differ(batch):
    left, top, right, bottom = batch.boxes.T
    assert ((left >= 0) & (left < right) & (right <= PHOTO_WIDTH)).all()
    assert ((top >= 0) & (top < bottom) & (bottom <= PHOTO_HEIGHT)).all()
    assert len(batch.boxes.unique(dim=0)) == COUNT


def test_without_a_gpu_nothing_is_decoded_by_nvjpeg(folder):
    assert gpu_decoder.why_not(CPU, folder) == "there is no GPU"


NOT_BUILT = "decode_jpegs_cuda: torchvision not compiled with nvJPEG support"


@pytest.mark.parametrize("error", [RuntimeError(f"{NOT_BUILT}\nmore"), ImportError("no decode_jpeg")])
def test_a_torchvision_without_nvjpeg_says_so(monkeypatch, folder, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(gpu_decoder, "decoded", fail)
    assert gpu_decoder.why_not(torch.device("cuda", 0), folder) == str(error).partition("\n")[0]


def test_a_gpu_that_decodes_wrongly_is_named():
    good, without, bad, broken = map(gpu, range(4))
    faults = gpu_decoder.wrongly_decoded({good: 0.4, without: None, bad: 31.0, broken: float("nan")})
    assert [fault.subjects for fault in faults] == [(without,), (bad,), (broken,)]
    assert {fault.code for fault in faults} == {"product_wrong"}


def test_where_no_gpu_has_nvjpeg_none_is_named():
    assert gpu_decoder.wrongly_decoded({gpu(0): None, gpu(1): None}) == []
