"""Prototxt files into messages and back, and every way that reading one can fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter, SolverParameter
from poseidon.caffe.proto.text import layer_lines, parse, read, read_text, strings_are_text, to_text
from poseidon.errors import DefinitionError

FILES = {
    b"layer {}" * 50_001: "50,001 layers; expected at most 50,000",
    b"": "the file is empty: it holds no settings",
    b"# only words\n": "the file is empty: it holds no settings",
    b"name: \"a\0b\"": "this is a binary file; prototxt text is expected",
    b"# caf\xe9\nname: 'caf\xe9 # "
b"a'\n": "the file is not UTF-8 text (byte 0xe9); prototxt text "
"is expected",
    b"layr {}": "unknown field 'layr' in NetParameter; did you mean 'layer'?",
    b"layer { clip_param { max: 1 } }": "required field 'min' is missing in clip_param",
}  # fmt: skip


@pytest.mark.parametrize("content", FILES)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "net.prototxt"
    path.write_bytes(content)
    with pytest.raises(DefinitionError) as caught:
        read(path, NetParameter())
    assert caught.value.message == FILES[content]
    assert caught.value.source == str(path)
    assert str(caught.value).startswith(f"{path}:")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match=r"missing.prototxt: there is no such file$"):
        read(tmp_path / "missing.prototxt", NetParameter())
    with pytest.raises(DefinitionError, match="this is a folder; a prototxt file is expected"):
        read(tmp_path, NetParameter())
    (tmp_path / "file").write_text("")
    with pytest.raises(DefinitionError, match="cannot be read: Not a directory"):
        read(tmp_path / "file" / "net.prototxt", NetParameter())


def test_reads_what_windows_wrote(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    for encoding in ("utf-8-sig", "utf-16"):
        path.write_bytes('name: "a"\r\nlayer {\r\n}\r\n'.encode(encoding))
        assert read(path, NetParameter()).name == "a"


def test_lines_that_end_in_a_carriage_return_alone(tmp_path: Path) -> None:
    (tmp_path / "mac.prototxt").write_bytes(
        b'# comment\rname: "x"  # another\rlayer { nme: "y" }\r'
    )
    with pytest.raises(DefinitionError, match=r"mac\.prototxt:3:9: unknown field 'nme'"):
        read(tmp_path / "mac.prototxt", NetParameter())


@pytest.mark.parametrize("comment", ["café", "训练 'a\\", 'b"'])
@pytest.mark.parametrize("encoding", ["latin-1", "gbk", "utf-8"])
def test_comments_may_be_in_any_encoding(tmp_path: Path, comment: str, encoding: str) -> None:
    path = tmp_path / "net.prototxt"
    lines = b'# %b\nname: "# \xc3\xa9"# %b\r\nlayer {# %b'.replace(
        b"%b", comment.encode(encoding, "replace")
    )
    path.write_bytes(lines + b"\n}")
    net = read(path, NetParameter())
    assert (net.name, len(net.layer)) == ("# é", 1)
    assert layer_lines(read_text(path)) == [3]


def test_the_line_of_a_byte_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_bytes(b"# caf\xe9\nname: 'caf\xe8'\n")
    with pytest.raises(DefinitionError, match=r"net.prototxt:2"):
        read(path, NetParameter())


def test_parse_fills_and_returns_the_message() -> None:
    message = SolverParameter()
    assert parse("max_iter: 3", message, source="given") is message
    assert message.max_iter == 3


def test_an_error_names_source_line_and_column() -> None:
    with pytest.raises(DefinitionError) as caught:
        parse('max_iter: 3\n  device_id: "0"', SolverParameter(), source="solver.prototxt")
    assert str(caught.value).startswith("solver.prototxt:2:14: device_id in SolverParameter")


@pytest.mark.parametrize(
    "text, line",
    [
        ("layer {\n clip_param { min: 0 max: 1 } }\nlayer {\n clip_param { min: 0 } }", 4),
        ("layer {\n name: 'x' }\nlayer {\n clip_param { }\n}", 4),
    ],
)
def test_a_missing_required_setting_names_the_line_of_its_block(text: str, line: int) -> None:
    with pytest.raises(DefinitionError, match=r"required field 'm\w\w' is missing") as caught:
        parse(text, NetParameter(), source="net")
    assert caught.value.line == line


def test_text_and_back() -> None:
    text = 'name: "n"\nlayer {\n  name: "ä\\n"\n  lrn_param {\n    alpha: 5e-05\n  }\n}\n'
    message = parse(text, NetParameter(), source="")
    again = parse(to_text(message), NetParameter(), source="")
    assert again == message
    assert to_text(message).startswith('name: "n"\nlayer {\n  name: "')
    assert "alpha: 5e-05" in to_text(message)


@pytest.mark.parametrize(
    "text, lines",
    [
        ("", []),
        ("name: 'x'\nlayer {\n}\n# layer {\nlayers { layer { } }\nlayer\n{}", [2, 5, 6]),
        ("layer: [{},\n{}]", [1, 2]),
        ("input: 'layer {'\nlayer: < name: 'layer' >", [2]),
    ],
)
def test_layer_lines(text: str, lines: list[int]) -> None:
    assert layer_lines(text) == lines


def test_a_net_of_seven_thousand_lines_takes_less_than_a_second_of_processor() -> None:
    layer = 'layer {\n  name: "c"\n  type: "Convolution"\n  convolution_param {\n    num_output: 64\n    pad: 1\n  }\n}\n'
    text = layer * 900
    started = time.process_time()
    net = parse(text, NetParameter(), source="net")
    lines = layer_lines(text)
    assert time.process_time() - started < 1
    assert len(net.layer) == len(lines) == 900
    assert lines[-1] == 899 * 8 + 1


NET = NetParameter(
    name="AA",
    layer=[
        LayerParameter(
            name="BB",
            top=["CC", "DD"],
            convolution_param={"weight_filler": {"type": "EE"}},  # type: ignore[arg-type]
        )
    ],
)


def test_text_is_text() -> None:
    assert strings_are_text(NET)
    assert strings_are_text(NetParameter())


@pytest.mark.parametrize("string", (b"AA", b"BB", b"CC", b"DD", b"EE"))
def test_one_bad_string_is_found(string: bytes) -> None:
    content = NET.SerializeToString().replace(string, b"\xe3A")
    assert not strings_are_text(NetParameter.FromString(content))
