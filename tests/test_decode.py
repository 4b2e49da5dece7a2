import io

import numpy as np
import pytest
from PIL import Image

from keras_moco.data.decode import fit_boxes, try_decode_boxes, try_header

BOXES = np.int32([[10, 20, 40, 60], [5, 50, 80, 44]])


def photo(height=120, width=160, mode="RGB"):
    """A smooth picture, which JPEG changes little."""
    y, x = np.mgrid[:height, :width]
    waves = [128 + 60 * np.sin(x / a + y / b) for a, b in ((9, 20), (15, 11))]
    array = np.stack([*waves, 0.5 * (waves[0] + waves[1])], axis=2)
    return Image.fromarray(array.astype(np.uint8)).convert(mode)


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def crops(found):
    image, boxes = found
    return [image[t : t + h, x : x + w] for t, x, h, w in boxes]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_window_of_a_jpeg_holds_what_the_whole_image_holds(mode):
    content = encoded(photo(mode=mode), quality=95)
    whole = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    image, boxes = try_decode_boxes(content, BOXES, size=40)
    assert image.shape == (80, 74, 3)  # rows 5 to 85, columns 20 to 94
    for cut, (top, left, height, width) in zip(
        crops((image, boxes)), BOXES, strict=True
    ):
        expected = whole[top : top + height, left : left + width]
        assert cut.shape == expected.shape
        difference = np.abs(np.int32(cut) - expected)
        assert difference.mean() < 2 and difference.max() < 25


@pytest.mark.parametrize("size, scale", [(41, 1), (20, 2), (10, 4), (5, 8)])
def test_jpeg_is_decoded_at_the_scale_that_the_smallest_box_needs(size, scale):
    content = encoded(photo(), quality=95)
    for cut, (top, left, height, width) in zip(
        crops(try_decode_boxes(content, BOXES, size)), BOXES, strict=True
    ):
        assert abs(cut.shape[0] - height / scale) <= 1
        assert abs(cut.shape[1] - width / scale) <= 1
        expected = photo().crop((left, top, left + width, top + height))
        expected = np.array(expected.resize(cut.shape[1::-1], Image.BOX))
        assert np.abs(np.int32(cut) - expected).mean() < 15


@pytest.mark.parametrize(
    "kind, mode", [("JPEG", "CMYK"), ("PNG", "RGB"), ("WEBP", "RGB")]
)
def test_other_kinds_are_decoded_whole(kind, mode):
    content = encoded(photo(mode=mode), kind, quality=95)
    image, boxes = try_decode_boxes(content, BOXES, size=40)
    assert image.shape == (120, 160, 3)
    np.testing.assert_array_equal(boxes, BOXES)


def test_boxes_are_of_the_image_as_it_is_turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    content = encoded(photo(), exif=exif, quality=95)
    assert try_header(content) == (160, 120)
    box = np.int32([[100, 10, 50, 30]])
    (cut,) = crops(try_decode_boxes(content, box, size=30))
    expected = np.array(photo().transpose(Image.ROTATE_270))[100:150, 10:40]
    assert np.abs(np.int32(cut) - expected).mean() < 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"this is text",
        encoded(photo())[:1500],
        encoded(photo(), "PNG")[:99],
    ],
    ids=["empty", "text", "half a JPEG", "half a PNG"],
)
def test_broken_content_gives_nothing(content):
    box = np.int32([[0, 0, 120, 160]])
    assert try_decode_boxes(content, box, size=40) is None


def test_cut_off_jpeg_is_found_by_its_end():
    content = encoded(photo())
    assert try_header(content) == (120, 160)
    assert try_header(content + b"\0" * 20) == (120, 160)  # padded by a camera
    assert try_header(content[: len(content) // 2]) is None


def test_boxes_fit_an_image_of_another_size():
    boxes = np.int32([[0, 0, 100, 200], [50, 100, 50, 100], [99, 0, 1, 1]])
    fitted = fit_boxes(boxes, (100, 200), (50, 20))
    assert fitted.tolist() == [[0, 0, 50, 20], [25, 10, 25, 10], [49, 0, 1, 1]]
    assert fit_boxes(boxes, (100, 200), (1, 1)).tolist() == [[0, 0, 1, 1]] * 3
