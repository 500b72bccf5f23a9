"""Files and directories appear complete or not at all; locks exclude other processes; outputs are checked early."""

import os
import subprocess
import sys

import pytest

from linformer_kit.errors import UserError
from linformer_kit.files import atomic_directory, atomic_file, check_writable, lock, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_after_writing(path, error):
    path.write_text("half")
    raise error


def test_a_file_is_replaced_only_if_the_block_succeeds(tmp_path):
    path = tmp_path / "notes.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as unfinished:
        fail_after_writing(unfinished, ZeroDivisionError)
    assert (path.read_text(), names(tmp_path)) == ("old", ["notes.txt"])
    write_text(path, "ü")
    assert path.read_bytes() == "ü".encode()


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "notes.txt", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "notes.txt").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_directory_is_replaced_only_if_the_block_succeeds(tmp_path, error):
    folder = tmp_path / "deep" / "folder"
    for text in ("old", "new"):
        with atomic_directory(folder) as unfinished:
            (unfinished / "a").write_text(text)
            assert not folder.exists() or (folder / "a").read_text() == "old"
    with pytest.raises(error), atomic_directory(folder) as unfinished:
        fail_after_writing(unfinished / "a", error)
    assert ((folder / "a").read_text(), names(folder.parent)) == ("new", ["folder"])


def test_the_last_step_runs_before_the_directory_appears(tmp_path):
    def write_manifest(unfinished):
        assert not (tmp_path / "folder").exists()
        (unfinished / "manifest").write_text(",".join(names(unfinished)))

    with atomic_directory(tmp_path / "folder", before_rename=write_manifest) as unfinished:
        (unfinished / "a").touch()
    assert (tmp_path / "folder" / "manifest").read_text() == "a"


def test_only_the_writer_creates_and_renames(tmp_path):
    waits = []
    with atomic_directory(tmp_path / "folder") as mine:
        with atomic_directory(
            tmp_path / "folder", is_writer=False, barrier=lambda: waits.append(mine.exists())
        ) as other:
            (other / "shard").touch()
        assert other == mine
        assert waits == [True, True, True]
        assert not (tmp_path / "folder").exists()
    assert names(tmp_path / "folder") == ["shard"]


def test_independent_processes_may_build_the_same_directory(tmp_path):
    with atomic_directory(tmp_path / "folder", keep_existing=True) as slow:
        (slow / "a").write_text("slow")
        with atomic_directory(tmp_path / "folder", keep_existing=True) as fast:
            (fast / "a").write_text("fast")
    assert ((tmp_path / "folder" / "a").read_text(), names(tmp_path)) == ("fast", ["folder"])


def test_a_lock_excludes_other_processes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from linformer_kit.files import lock\n"
        "with lock(Path(sys.argv[1]), 'taken'): print('held')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with lock(tmp_path / ".lock", "taken"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "UserError: taken" in done.stderr
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "held\n"


def test_an_unwritable_directory_is_detected_without_writing(tmp_path):
    check_writable(tmp_path / "a" / "b", "choose another")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file, not a directory; choose another"):
        check_writable(tmp_path / "file" / "b", "choose another")
    assert names(tmp_path) == ["file"]
