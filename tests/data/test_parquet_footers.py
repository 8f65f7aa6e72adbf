"""The footer of a parquet file is read without pyarrow, and a damaged one is refused."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.data.parquet_footers import _column_chunks


def test_a_footer_says_what_its_columns_hold(tmp_path):
    path, texts = tmp_path / "a.parquet", [f"text {i}" for i in range(2_500)]
    table = pa.table({"text": texts, "n": [{"a": [1, None]}] * 2_500})
    pq.write_table(table, path, row_group_size=1_000, use_dictionary=["text"])
    expected = []
    for group in map(pq.read_metadata(path).row_group, range(3)):
        for part in map(group.column, range(2)):
            dictionary = any("DICTIONARY" in kind for kind in part.encodings)
            sizes = part.num_values, part.total_uncompressed_size, part.total_compressed_size
            expected.append((part.path_in_schema, dictionary, *sizes))
    chunks = list(_column_chunks(path))
    assert [chunk.name for chunk in chunks] == [name for name, *_ in expected]
    assert [bool(chunk.encodings & {2, 8}) for chunk in chunks] == [dictionary for _, dictionary, *_ in expected]
    assert [(chunk.values, chunk.unpacked_bytes, chunk.packed_bytes) for chunk in chunks] == [
        tuple(sizes) for _, _, *sizes in expected
    ]


@pytest.mark.parametrize(
    "footer",
    [b"", b"\x19", b"\x49\xfc\xff\xff\xff\x7f", b"\x1c" * 50_000, b"\x49\x1c\x19\x1c\x00\x00\x00"],
    ids=range(5),
)
def test_a_footer_of_other_bytes_is_refused(footer, tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(ValueError, match="its footer"):
        list(_column_chunks(path))
