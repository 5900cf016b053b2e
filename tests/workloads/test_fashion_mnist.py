"""The IDX parser, the loader and the download on bad input; the real files where they are installed."""

from __future__ import annotations

import contextlib
import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import DataError
from anabranch.workloads import Shard, load_app
from anabranch.workloads.fashion_mnist import DEFAULT_PATH, SHA256, download
from anabranch.workloads.idx import read_idx

GOOD = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(6))


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_is_read_plain_or_gzipped(tmp_path: Path, packed: bool) -> None:
    file = tmp_path / "a.idx"
    file.write_bytes(gzip.compress(GOOD) if packed else GOOD)
    np.testing.assert_array_equal(read_idx(file, 2), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "starts with nothing"),
        (GOOD[:3], "starts with 000008"),
        (bytes([0, 0, 9, 2]) + GOOD[4:], "starts with 00000902"),
        (bytes([0, 0, 8, 3]) + GOOD[4:], "starts with 00000803, an IDX file with 00000802"),
        (GOOD[:9], "ends within its header"),
        (GOOD[:-1], "says 6 values, it holds only 5"),
        (GOOD + b"\0", "says 6 values, it holds more"),
        (GOOD[:4] + b"\xff" * 8, "claims 18446744065119617025 values"),
        (gzip.compress(GOOD, mtime=0)[:-4], "gzip stream is broken"),
        (b"\x1f\x8b" + b"\0" * 20, "gzip stream is broken"),
        (gzip.compress(GOOD[:-1], mtime=0), "only 5"),
    ],
)
def test_a_malformed_idx_file_is_named_with_its_flaw(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "bad.idx"
    file.write_bytes(content)
    with pytest.raises(DataError, match=text) as caught:
        read_idx(file, 2)
    assert "bad.idx" in str(caught.value)


@given(content=st.binary(max_size=60), packed=st.booleans(), cut=st.integers(0, 60))
def test_random_bytes_give_a_data_error_or_an_array(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, packed: bool, cut: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "random.idx"
    body = GOOD[:cut] + content
    file.write_bytes(gzip.compress(body, mtime=0)[: 10 + cut] if packed else body)
    with contextlib.suppress(DataError):
        assert read_idx(file, 2).ndim == 2


def test_absent_data_comes_with_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"apt-get install dataset-fashion-mnist.*data_path"):
        load_app("fashion-mnist", str(tmp_path)).data(Shard("train"))


def test_labels_and_images_must_be_as_many(tmp_path: Path, fashion_folder: Path) -> None:
    shutil.copytree(fashion_folder, tmp_path / "data")
    shutil.copy(fashion_folder / "train-labels-idx1-ubyte", tmp_path / "data" / "t10k-labels-idx1-ubyte")
    with pytest.raises(DataError, match="x has 100 rows and y has 600"):
        load_app("fashion-mnist", str(tmp_path / "data")).data(Shard("test"))


def test_images_must_be_28_square(tmp_path: Path, fashion_folder: Path) -> None:
    shutil.copytree(fashion_folder, tmp_path / "data")
    small = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(4)
    (tmp_path / "data" / "train-images-idx3-ubyte.gz").write_bytes(small)
    with pytest.raises(DataError, match="2 x 2, not 28 x 28"):
        load_app("fashion-mnist", str(tmp_path / "data")).data(Shard("train"))


@pytest.mark.parametrize(
    "content",
    [b"not a gzip file", gzip.compress(b"other images", mtime=0), gzip.compress(GOOD, mtime=0)[:-9]],
)
def test_a_download_with_other_contents_leaves_no_file(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in SHA256:
        (source / f"{name}.gz").write_bytes(content)
    with pytest.raises(DataError, match="SHA-256"):
        download(tmp_path / "to", source.as_uri())
    assert list((tmp_path / "to").iterdir()) == []


def test_a_download_from_nowhere_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be fetched"):
        download(tmp_path / "to", (tmp_path / "nowhere").as_uri())


@pytest.mark.skipif(not Path(DEFAULT_PATH).is_dir(), reason="dataset-fashion-mnist is not installed")
def test_the_installed_files_pass_the_checksums_of_the_download(tmp_path: Path) -> None:
    folder = download(tmp_path / "to", Path(DEFAULT_PATH).as_uri())
    examples = load_app("fashion-mnist", str(folder)).data(Shard("test"))
    assert examples.x.shape == (10_000, 1, 28, 28)
    assert np.bincount(examples.y).tolist() == [1000] * 10
    assert abs(float(examples.x.mean())) < 0.01
    assert float(examples.x.std()) == pytest.approx(1.0, abs=0.01)
