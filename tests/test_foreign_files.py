"""Files from outside: what no reader may be given is refused, with its place and the exit code of its kind."""

from __future__ import annotations

import io
import sqlite3
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cli.main import main
from planner import HardwareError, ModelError, PlanError, UsageError
from planner.foreign_files import MOST_ARRAY_BYTES, MOST_BYTES, Door
from tests.shared_data import shared_path

DOOR = Door("f", ModelError, "mend it")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("{", "f:1:2", "not JSON"),
        ('{"a": 1,\n "b": NaN}', "f:2:7", "NaN is not JSON"),
        ('{"a": "1e400",\n "b": [0, 1e400]}', "f:2:11", "1e400 is beyond what can be read"),
        ('{"a": 9223372036854775808}', "f:1:7", "9223372036854775808 is beyond"),
        ('{"a": -' + "9" * 5000 + "}", "f:1:7", "a number of 5001 characters"),
        ('{"a": 1, "b": {"a": 2},\n "a": 3}', "f:2:7", "key 'a' appears twice"),
        ('["", "\\ud83d\\ude00",\n  "\\ud800"]', "f:2:3", "half a character"),
        ('{"\\udc00": 1}', "f:1:12", "half a character"),
        ("[" * 65 + "]" * 65, "f:1:65", "nested deeper than 64 levels"),
        ('\n{"a": ' + "[" * 100_000, "f:2:70", "nested deeper than 64 levels"),
        ("\0", "f:1:1", "a null byte"),
    ],
)
def test_json_that_is_refused(text: str, place: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        DOOR.json(text)
    assert caught.value.problem.where == place
    assert message in caught.value.problem.message
    assert "\n" not in str(caught.value)


def test_json_that_is_read() -> None:
    text = '\ufeff{"a": 9223372036854775807, "b": -1.5e-300, "c": "\\ud83d\\ude00"}'.encode()
    assert DOOR.json(text) == {"a": 2**63 - 1, "b": -1.5e-300, "c": "\U0001f600"}
    assert DOOR.json("[" * 64 + "]" * 64)
    assert DOOR.json('{"limit": [0.0, Infinity]}', any_number=True) == {"limit": [0.0, float("inf")]}


def test_a_text_that_is_not_utf_8_has_a_place() -> None:
    with pytest.raises(ModelError, match=r"^f:2:3: not a text file: byte 0xff is not UTF-8 \(mend it\)$"):
        DOOR.text(b"abc\nde\xff")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "not TOML"),
        ("a = [" * 3000, "not TOML|nested deeper"),
        ("a = " + "[" * 80 + "]" * 80, "nested deeper than 64 levels"),
        ("[t]\na = nan", r"t\.a is nan, no finite number"),
        ("[t]\na = 9223372036854775808", r"t\.a is a whole number of more than 64 bits"),
        ("a = " + "9" * 5000, "not TOML|64 bits"),
    ],
)
def test_toml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DOOR.toml(text)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "f:1", "no header line"),
        ("a,a\n1,2", "f:1", "stands there twice"),
        ("a,b\n1,2\n1,2,3", "f:3", "more cells than the 2 columns"),
        ('a,b\n1,"2', "f:2", "not CSV"),
        ("a\n" + "x" * 200_000, "f:2", "not CSV"),
    ],
)
def test_csv_that_is_refused(text: str, place: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        DOOR.table(text)
    assert caught.value.problem.where == place
    assert message in caught.value.problem.message


def test_rows_have_their_lines() -> None:
    assert DOOR.table("a, b\n\n 1 ,2\n3\n") == (["a", "b"], [(3, {"a": "1", "b": "2"}), (4, {"a": "3", "b": ""})])


def test_shell_text() -> None:
    assert DOOR.words("--a 1 \\\n --b 'x y' # rest") == ["--a", "1", "--b", "x y"]
    with pytest.raises(ModelError, match="no closing quotation"):
        DOOR.words("--a '1")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null byte")):
        with pytest.raises(ModelError, match=message):
            DOOR.content(path)
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(MOST_BYTES + 1)
    with pytest.raises(ModelError, match="larger than 512 MiB"):
        DOOR.content(tmp_path / "large")


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def test_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    whole = npz(x=np.arange(6).reshape(2, 3))
    path.write_bytes(whole)
    assert DOOR.arrays(path)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    for content, message in (
        (whole[:-30], "not a zip file"),
        (whole[:60] + b"\xff" * 40 + whole[100:], "cannot be read as arrays"),
        (npz(x=np.array([{}], dtype=object)), "Object arrays cannot be loaded"),
        (b"", "cannot be read as arrays"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            DOOR.arrays(path)


def test_an_archive_that_unpacks_to_8_gb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        for name in "xy":
            archive.writestr(f"{name}.npy", b"\x93NUMPY")
    listed = bytearray(other.getvalue())
    for at in (i + 24 for i in range(len(listed)) if listed[i : i + 4] == b"PK\x01\x02"):
        listed[at : at + 4] = (0xF0000000).to_bytes(4, "little")
    path.write_bytes(bytes(listed))
    assert MOST_ARRAY_BYTES < 2 * 0xF0000000
    with pytest.raises(ModelError, match=r"unpacks to 7\.5 GiB, more than the 4 GiB"):
        DOOR.arrays(path)


def test_a_store_of_other_columns_damaged_locked_or_full(tmp_path: Path) -> None:
    from planner.ask.sweeps import Store, SweepRow

    point = (("model", "m"), ("hardware", "h"))
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE rows (a, b)")
    with pytest.raises(UsageError, match="its table has the columns a, b"):
        Store(other)
    path = tmp_path / "store.sqlite"
    store = Store(path)
    store.put(SweepRow(point, reason="none"))
    assert store.get(point) == SweepRow(point, reason="none")
    for row, message in (
        ("[1]", "no JSON object"),
        ('{"point": 3}', "no result of a sweep"),
        ("{", "not JSON"),
        ("7", "no JSON object"),
    ):
        with sqlite3.connect(path) as file:
            file.execute("UPDATE rows SET row = ?", (row,))
        with pytest.raises(UsageError, match=message):
            store.get(point)
    store.close()
    with sqlite3.connect(path) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UsageError, match="database is locked"):
            Store(path, patience_s=0.01)


def test_a_store_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.ask.sweeps import Store, SweepRow

    connect = sqlite3.connect

    def small(path: Path, timeout: float) -> sqlite3.Connection:
        file = connect(path, timeout=timeout)
        file.execute("PRAGMA max_page_count = 4")
        return file

    monkeypatch.setattr(sqlite3, "connect", small)
    store = Store(tmp_path / "store.sqlite")
    with pytest.raises(UsageError, match="database or disk is full"):
        store.put(SweepRow((("model", "x" * 100_000),), reason="none"))


HOSTILE = {
    "costs_1514-c.json": (
        ModelError.exit_code,
        "plan gpt2 -H dgx-a100 -b 64 --costs FILE",
        ": operators is missing or wrong",
    ),
    "from_1335-ds.json": (
        UsageError.exit_code,
        "predict gpt2 -H dgx-a100 --from deepspeed FILE",
        ":1:65: nested deeper",
    ),
    "from_1419-megatron.txt": (
        UsageError.exit_code,
        "predict gpt2 -H dgx-a100 --from megatron FILE",
        "--tensor-model-parallel-size",
    ),
    "hf_1600-config.json": (
        ModelError.exit_code,
        "plan FILE -H dgx-a100 -b 8",
        ": num_nextn_predict_layers is 1000000000000",
    ),
    "import_1172-calculon.json": (HardwareError.exit_code, "hardware import FILE", ":1:464: 1e+308 is beyond"),
    "import_1305-calculon.json": (HardwareError.exit_code, "hardware import FILE", ":1:1: too deep"),
    "import_36-nccl.txt": (
        HardwareError.exit_code,
        "hardware import FILE --into dgx-a100 --level nvswitch",
        ": the line of rank 6 is missing",
    ),
    "onnx_1120-m.onnx": (
        ModelError.exit_code,
        "models rebatch FILE --batch 4 -o OUT",
        "calls a function of 3 operands with 43",
    ),
    "onnx_20716-m.onnx": (
        ModelError.exit_code,
        "models rebatch FILE --batch 2 --dim batch=2 -o OUT",
        "its input is smaller than its window",
    ),
    "orders_1050-o.csv": (
        PlanError.exit_code,
        "plan gpt2 -H dgx-a100 -b 64 --schedule-file FILE",
        ":1: there are no actions",
    ),
    "orders_1101-o.csv": (
        PlanError.exit_code,
        "plan gpt2 -H dgx-a100 -b 64 --schedule-file FILE",
        ":15: worker 2147483648 of 20 actions",
    ),
    "stack_1658-s.yaml": (
        HardwareError.exit_code,
        "plan gpt2 -H dgx-a100 -b 64 --stack FILE",
        ":9:19: '1' should be a number",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_line_with_their_place(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line, message = HOSTILE[name]
    file = str(shared_path(f"cases/hostile/{name}"))
    words = [{"FILE": file, "OUT": str(tmp_path / "out.onnx")}.get(word, word) for word in line.split()]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err.splitlines()[0]
    assert ended.value.code == code
    assert said.startswith(f"shardplan: error: {file}")
    assert message in said


def test_the_same_kinds_without_those_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, line, code, message in (
        (
            "a.csv",
            "worker,action\n",
            "plan gpt2 -H dgx-a100 -b 8 --schedule-file FILE",
            7,
            "a.csv:1: there are no actions",
        ),
        (
            "b.csv",
            "worker,action\n99999999,F0.0\n",
            "plan gpt2 -H dgx-a100 -b 8 --schedule-file FILE",
            7,
            "b.csv:2: worker 99999999 of 1 actions",
        ),
        (
            "c.txt",
            "--pipeline-model-parallel-size 0",
            "predict gpt2 -H dgx-a100 --from megatron FILE",
            2,
            "--pipeline-model-parallel-size is 0",
        ),
        (
            "d.json",
            '{"train_micro_batch_size_per_gpu": -1}',
            "predict gpt2 -H dgx-a100 --from deepspeed FILE",
            2,
            "train_micro_batch_size_per_gpu is -1",
        ),
        ("e.json", "[" * 900 + "]" * 900, "predict gpt2 -H dgx-a100 --from deepspeed FILE", 2, "e.json:1:65: nested"),
        (
            "f.toml",
            "[parallelism]\ntensor_parallel_degree = 0",
            "predict gpt2 -H dgx-a100 --from torchtitan FILE",
            2,
            "tensor_parallel_degree is 0",
        ),
        (
            "g.yaml",
            "stack: s\nloss: {value: [3, x], source: vendor}\n",
            "plan gpt2 -H dgx-a100 -b 8 --stack FILE",
            4,
            "g.yaml:2:19: '1' should be a number",
        ),
        (
            "h.yaml",
            "cluster: c\ndevices: t4-16gb\nnodes: 99999999999999999999\n",
            "hardware lint FILE",
            4,
            "h.yaml:3:8: 99999999999999999999 is beyond what can be read",
        ),
        (
            "i.json",
            '{"mem1": {"GiB": 80}, "matrix": [], "vector": {}, "networks": [{"size": 1e400}]}',
            "hardware import FILE",
            4,
            "i.json:1:73: 1e400 is beyond",
        ),
        (
            "j.json",
            '{"mem1": {"GiB": 80}, "matrix": [], "vector": {}, "networks": [3]}',
            "hardware import FILE",
            4,
            "mem1.GBps is missing",
        ),
        ("k.csv", "tp,seconds\n1,1,1\n", "calibrate gpt2 -H dgx-a100 --runs FILE", 2, "k.csv:2: more cells than"),
        ("l.yaml", "slower: \0", "diff a b --rules FILE", 7, "cannot read"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / name) if word == "FILE" else word for word in line.split()])
        out, err = capsys.readouterr()
        assert ended.value.code == code, (name, err)
        assert message in err + out, name
