"""Launch scripts are read as a shell would: variables, arrays, quotes, and which of their words are arguments."""

from __future__ import annotations

import pytest

import planner
from planner import export
from planner.export.reading.shell import read_arguments

MULTI_LINE = r"""#!/bin/bash
#SBATCH --nodes=4
# it isn't an argument: --tensor-model-parallel-size 8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS   # a comment (with a bracket
    --rdzv_id 4
)
MODEL_ARGS=(
    --num-layers 12
    --hidden-size 768
)
MODEL_ARGS+=(--seq-length 1024)
EXTRA="--bf16 --micro-batch-size 2"
if [ -n "$FAST" ]; then
    EXTRA+=" --overlap-grad-reduce"
fi
mkdir --parents /tmp/x
python tools/preprocess_data.py --input my-corpus.json --workers 4
srun --ntasks-per-node 8 torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py ${MODEL_ARGS[@]} $EXTRA \
    --pipeline-model-parallel-layout "Et*6|t*6L" "$@" 2>&1 | tee log.txt --append
"""


def test_a_script_with_arrays_launcher_and_other_commands() -> None:
    found = read_arguments(MULTI_LINE, flags=("--bf16", "--overlap-grad-reduce"))
    assert found.program == "pretrain_gpt.py"
    assert found.unread == ()
    assert found.values == {
        "--num-layers": "12", "--hidden-size": "768", "--seq-length": "1024", "--bf16": True, "--micro-batch-size": "2",
        "--overlap-grad-reduce": True, "--pipeline-model-parallel-layout": "Et*6|t*6L",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--a 1\n--b\n--c=3\n", {"--a": "1", "--b": True, "--c": "3"}),
        ("ARGS='--a 1 --b two'", {"--a": "1", "--b": "two"}),
        ("A=4\nB=${A}\nrun.py --a $B --b ${C:-7} --c ${D}", {"--a": "4", "--b": "7", "--c": "${D}"}),
        ("CMD='torchrun --nnodes 2 train.py --a 1'\neval $CMD", {"--a": "1"}),
        ("bash -c 'torchrun train.py --a \"x y\" --b 2'", {"--a": "x y", "--b": "2"}),
        ("run.py --a 1 --a 2", {"--a": "2"}),
        ("run.py --list 1 2 3 --d -1", {"--list": ["1", "2", "3"], "--d": "-1"}),
        ("X=1 Y=2 run.py --a 1 && rm -r --force z", {"--a": "1"}),
        ("run.py --a 'it is # no comment' # but this --b 3", {"--a": "it is # no comment"}),
        ("A=(--a 1)\nB=(\"${A[@]}\" --b 2)\nrun.py ${B[@]}", {"--a": "1", "--b": "2"}),
        ("N=4\nM=$((N * 8))\nrun.py --a $M --b $((2*$N-1)) --c $((X*2)) --d $((7/2%2))", {
            "--a": "32", "--b": "7", "--c": "$((X*2))", "--d": "1",
        }),
        ('ARGS=(\n"--a 1"\n"--b 2"\n)\nrun.py "${ARGS[@]}"', {"--a": "1", "--b": "2"}),
        ("ARGS='--a 1 --flag'\nPP=16\nEMPTY=", {"--a": "1", "--flag": True}),
        ("", {}),
        ("run.py", {}),
    ],
)  # fmt: skip
def test_words_of_a_script(text: str, values: dict[str, object]) -> None:
    assert read_arguments(text).values == values


def test_options_of_the_launcher_are_none_of_the_programs() -> None:
    script = "torchrun --nproc-per-node 8 --max-restarts 3 ${PROGRAM:?} --bf16 --seq-length 128"
    read = export.read_job(script, "megatron")
    assert read.precision == "bf16-fp32grad"
    assert read.sequence == 128
    assert export.read_job("torchrun --unheard-of 3 pretrain_gpt.py --bf16", "megatron").ignored == ()


def test_variables_that_hold_each_other_do_not_grow_without_end() -> None:
    doubled = "A='--a 1234567890'\n" + 'A="$A $A"\n' * 40 + "run.py $A"
    with pytest.raises(planner.UsageError, match="once its variables are filled in"):
        export.read_job(doubled, "megatron")
