import json
import os

import pytest

from keras_moco.outputs import check_file, draft_of, write_json


def test_what_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.png"
    path.write_text("old")
    with pytest.raises(OSError, match="No space") as error:
        with draft_of(path) as draft:
            draft.write_text("half")
            raise OSError(28, "No space left on device")
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.png"]


def test_folders_are_made_and_links_followed(tmp_path):
    path = tmp_path / "new/x.json"
    write_json(path, {"a": 1})
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_json(link, {"a": 2})
    assert link.is_symlink() and json.loads(path.read_text()) == {"a": 2}


def test_a_device_is_written_itself():
    check_file("--json", os.devnull)
    write_json(os.devnull, {})
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize(
    "place, message",
    [
        ("x.txt", "must end in .png or .pdf. Received"),
        ("folder.png", "must be a file; .*folder.png is a folder"),
        ("file/x.png", "file/x.png|file is a file"),
        ("dead/x.png", "is a link that leads nowhere"),
    ],
)
def test_places_that_will_not_do(tmp_path, place, message):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dead").symlink_to("nowhere")
    with pytest.raises(ValueError, match=message) as error:
        check_file("--to", tmp_path / place, (".png", ".pdf"))
    assert "\n" not in str(error.value)
