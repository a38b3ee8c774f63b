"""The options of all scripts: a mistake is one line, before any process is started; --help shows every default."""

import argparse
import importlib
import re

import pytest
import torch
from conftest import guards

import options

TRANSFORMERS = "FSDP_TP PP_FSDP_TP CP DiLoCo EP EP_FSDP FSDP Join Muon PP DDP_scratch Packing CP_ring CP_packed Stream"
TRANSFORMERS = [f"min_{name}" for name in (*TRANSFORMERS.split(), "TP", "ZeRO", "FSDP_scratch")]
NPROC = ["llm_FSDP", "min_GRPO", "mnist_DDP", "mnist_FSDP", *TRANSFORMERS]
POSITIONAL = {"multigpu_torchrun": ["5", "1"], "multinode_torchrun": ["5", "1"]}
SCRIPTS = [*NPROC, "min_FaultTolerant", "min_Generate", "rpc_param_server", "rpc_model_parallel"]
MAY_BE_0 = {"weight-decay", "bucket-mb", "seed", "least", "clip", "num-workers", "max-restarts", "outer-momentum"}
MAY_BE_0 |= {"warmup", "imitation-steps", "clip-low", "clip-high"}
TEXTS = {"snapshot-path", "data-dir", "checkpoint-dir", "tensorboard", "output", "model", "data", "eval-data"}
TEXTS |= {"chat-template"}
# Left out, nothing is done. min_Generate needs a model and prompts.
WITHOUT_DEFAULT = {"checkpoint-dir", "output", "tensorboard", "snapshot-path", "layers", "model", "prompts"}

# As typed into a shell, and the options, values and numbers that must be in the line that answers, the wrong one first.
REFUSED = """
min_DDP.py --batch_size=-1 | --batch-size/--batch_size '-1' 1
min_DDP.py --frobnicate | --frobnicate
single_gpu.py -5 1 | total_epochs '-5' 1
single_gpu.py 5 0 | save_every '0' 1
single_gpu.py 5 1 --batch_size=2.5 | --batch-size/--batch_size '2.5'
multigpu_torchrun.py 0 1 | total_epochs '0' 1
multigpu_torchrun.py 5 -1 | save_every '-1' 1
multinode_torchrun.py 5 0 | save_every '0' 1
RANK=0 WORLD_SIZE=3 multinode_torchrun.py 5 1 --global-batch-size 2 | --global-batch-size 2 3
multinode_torchrun.py 5 1 --num-workers -1 | --num-workers -1 0
min_FSDP.py --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
mnist_FSDP.py --strategy local --nproc 2 | --strategy local 1 2
RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 mnist_FSDP.py --strategy local | --strategy local 1 2
RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 mnist_FSDP.py --strategy local --nproc 1 | --strategy local 1 2
llm_FSDP.py --model folder | --model --data
llm_FSDP.py --from-scratch | --from-scratch --model
llm_FSDP.py --chat-template t | --chat-template
llm_FSDP.py --lora 4 | --lora --model
llm_FSDP.py --model folder --data a --lora 4 --from-scratch | --lora --model
llm_FSDP.py --model folder --data a --lora-alpha 2 | --lora-alpha --lora
llm_FSDP.py --model folder --data a --nf4 | --nf4 --lora
llm_FSDP.py --model folder --data rows.npy | --data --eval-data
llm_FSDP.py --model folder --data rows.npy --eval-data held-out.npy --pad | --data --pad --length
llm_FSDP.py --model folder --data rows.npy --eval-data held-out.npy --length 64 | --data --pad --length
llm_FSDP.py --length 1 | --length '1' 2
llm_FSDP.py --output / | --output /
mnist_DDP.py --data cifar | --data 'cifar' 'synthetic' 'mnist'
mnist_DDP.py --nproc 64 --accumulate 4 | --global-batch-size 128 256 64 --accumulate 4
mnist_DDP.py --snapshot-path a.pt --output ./a.pt | --output ./a.pt --snapshot-path
flyte_workflow.py --epochs 0 | --epochs '0' 1
flyte_workflow.py --nproc 2 | --nproc 2
min_DDP_scratch.py --nproc 2 --accumulate 3 --global-batch-size 16 | --global-batch-size 16 6 --accumulate
min_FSDP_TP.py --heads 3 --width 128 | --width 128 3
min_FSDP_TP.py --nproc 4 --replicate 2 --shard 4 | --nproc 4 --replicate 2 --shard 4 --tensor 1
min_FSDP_TP.py --nproc 3 --tensor 2 | --nproc 3 --replicate 1 --shard 1 --tensor 2
min_FSDP_TP.py --nproc 4 --replicate 2 --global-batch-size 6 | --global-batch-size 6 4 --replicate --shard
min_FSDP_TP.py --nproc 3 --tensor 3 --heads 4 | --heads 4 3 --tensor
min_FSDP_TP.py --nproc 2 --tensor 2 --length 31 | --length 31 2 --tensor
min_Bitwise.py --nproc 3 | --nproc 3
min_Bitwise.py --nproc 4 --global-batch-size 6 | --global-batch-size 6 4
min_CP.py --nproc 2 --heads 1 | --heads 1 2
min_CP.py --nproc 3 --length 128 --attention all-gather | --length 128 3
min_DiLoCo.py --outer-momentum 1 | --outer-momentum '1' 0 1
min_DiLoCo.py --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
min_EP.py --nproc 2 --experts 5 | --experts 5 2
min_EP.py --nproc 2 --top 9 | --top 9 8
min_EP.py --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
min_EP_FSDP.py --nproc 4 --expert-parallel 3 | --expert-parallel 3 4
min_EP_FSDP.py --nproc 4 --expert-parallel 4 --experts 6 | --experts 6 4 --expert-parallel
min_GRPO.py --nproc 3 --prompts 2 | --prompts 2 3
min_GRPO.py --group-size 1 | --group-size '1' 2
min_Packing.py --nproc 2 --accumulate 3 --global-batch-size 16 | --global-batch-size 16 6 --accumulate
min_Join.py --steps 20 --least 21 | --least 21 0 20 --steps
min_Join.py --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
min_PP.py --nproc 5 --layers 4 | --layers 4 5 1F1B
min_PP.py --nproc 2 --schedule DualPipeV --layers 3 | --layers 3 4 DualPipeV
min_PP.py --nproc 2 --micro-batches 1 | --micro-batches 1 2 1F1B
min_PP.py --nproc 2 --schedule DualPipeV --micro-batches 2 | --micro-batches 2 4 DualPipeV
min_PP.py --nproc 2 --schedule Interleaved1F1B --micro-batches 5 | --micro-batches 5 2
min_PP.py --nproc 2 --global-batch-size 12 --micro-batches 8 | --global-batch-size 12 8 --micro-batches
min_TP.py --nproc 3 --heads 4 | --heads 4 3
min_TP.py --nproc 2 --length 9 | --length 9 2
min_TP.py --heads 3 --width 128 | --width 128 3
min_ZeRO.py --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
rpc_model_parallel.py --global-batch-size 4 --micro-batches 5 | --micro-batches 5 1 4 --global-batch-size
""".strip().splitlines()


@pytest.fixture(autouse=True)
def no_gpu(gpus, monkeypatch, tmp_path):
    gpus(0)
    monkeypatch.chdir(tmp_path)


def rows_to_run(row):
    if "DualPipeV" in row and torch.__version__ < "2.12":
        return []  # there min_PP.py refuses the schedule itself
    return guards(row) if "flyte" in row else [row]  # its import takes seconds


@pytest.mark.parametrize("row", [each for row in REFUSED for each in rows_to_run(row)])
def test_a_mistake_is_one_line(row, main_of, monkeypatch):
    typed, _, expected = row.partition(" | ")
    variables = re.findall(r"\b([A-Z_]+)=(\d+)", typed)
    for name, value in variables:
        monkeypatch.setenv(name, value)
    script, *options = typed.split()[len(variables) :]
    status, stderr = main_of(script, *options)
    assert status == 2 and stderr.startswith(f"{script}: error: ") and stderr.count("\n") == 1
    first, *others = expected.split()
    assert f"argument {first}: " in stderr or f"unrecognized arguments: {first}" in stderr
    assert all(word in stderr for word in others), stderr


def words_of(script, *options):
    """A command line of a script, with the words that it needs."""
    return f"{script}.py", *POSITIONAL.get(script, []), *options


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_usage_and_all_defaults_and_every_number_and_choice_is_checked(script, capsys, typed):
    module = importlib.import_module(script)

    def exit_of(*options):
        typed(*words_of(script, *options))
        with pytest.raises(SystemExit) as exit_info:
            module.parse_args()
        return exit_info.value.code, *capsys.readouterr()

    status, help_text, _ = exit_of("--help")
    assert status == 0 and help_text.startswith(f"usage: {script}.py [-h] ")
    assert "".join(module.__doc__.partition("\n")[0].split()) in "".join(help_text.split())
    _, _, *options = re.split(r"\n  (?=-)", help_text.partition("\noptions:")[2])
    assert len(options) >= 2
    for option in options:
        name, value = re.match(r"--([\w-]+)(?:, --no-[\w-]+)?( \S+)?\s", option).groups()
        assert "(default:" in option or name in WITHOUT_DEFAULT, option
        is_text = name in TEXTS or (script, name) == ("min_Generate", "prompts")
        may_be_0 = name in MAY_BE_0 or (script, name) == ("min_Generate", "temperature")
        if not value or is_text:
            continue
        for wrong in ["x", "nan", "inf", "-1"] + ["0"] * (not may_be_0):
            status, stdout, stderr = exit_of(f"--{name}={wrong}")
            assert (status, stdout, stderr.count("\n")) == (2, "", 1), f"{name} {wrong}"
            assert stderr.startswith(f"{script}.py: error: argument --{name}: ") and wrong in stderr


@pytest.mark.parametrize("script", NPROC)
def test_nproc_is_the_number_of_processes(script, launched, gpus, monkeypatch):
    for visible, given, nprocs in ((0, (), 1), (0, ("--nproc", 4), 4), (4, ("--nproc", 1), 1)):
        gpus(visible)
        assert launched(*words_of(script, *given)).kwargs == {"nprocs": nprocs}
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    gpus(2)  # as on two machines with two GPUs each
    assert launched(*words_of(script)).kwargs == {"nprocs": 4}, "the launcher's number"


def test_more_processes_than_gpus_are_refused(main_of, gpus):
    gpus(4)
    status, line = main_of("min_FSDP.py", "--nproc", "8")
    assert status == 2 and "argument --nproc: '8' " in line and " 4\n" in line


@pytest.mark.parametrize("script", TRANSFORMERS)
def test_defaults_suit_any_number_of_processes(script, launched):
    """The script itself would refuse what does not fit."""
    for nproc in (*range(1, 9), 16):
        args = launched(f"{script}.py", "--nproc", nproc).args[1]
        assert args.nproc == nproc and args.width % args.heads == 0
        assert args.global_batch_size >= 16 and args.width >= 128 and args.heads >= 4


def test_other_numbers_of_processes(launched, gpus):
    for nproc in range(1, 9):
        assert launched("min_FSDP_TP.py", "--nproc", nproc, "--tensor", nproc).args[1].heads % nproc == 0
    assert launched("mnist_FSDP.py", "--strategy", "local").kwargs == {"nprocs": 1}
    assert launched("rpc_model_parallel.py").kwargs == {"nprocs": 2}
    assert launched("rpc_param_server.py", "--trainers", 4).kwargs["nprocs"] == 5
    assert launched("min_Join.py", "--steps", 4).args[1].least == 3, "three quarters"
    for visible, layers in ((0, 4), (2, 4), (8, 8)):  # enough for a stage on each
        gpus(visible)
        assert launched("min_PP.py").args[1].layers == layers


def test_an_option_may_be_typed_with_underscores():
    parser = options.ArgumentParser("What the script does.\n")
    parser.add_argument("steps", type=int)
    parser.add_argument("--test-batch-size", type=options.whole_number(1))
    parser.add_argument("--model-file")
    parser.add_argument("--use-fast-path", action=argparse.BooleanOptionalAction)
    expected = {"steps": 50, "test_batch_size": 10, "model_file": "my_model--a_b.pt", "use_fast_path": False}
    for words in (
        "50 --test_batch_size 10 --model_file=my_model--a_b.pt --no_use_fast_path",
        "50 --test-batch-size=10 --model-file my_model--a_b.pt --no-use-fast-path",
    ):
        assert vars(parser.parse_args(words.split())) == expected


FOLDERS = [  # where scripts save
    *[("llm_FSDP", option) for option in ("--checkpoint-dir", "--tensorboard", "--output")],
    *[(f"{name}_FSDP", "--checkpoint-dir") for name in ("min", "mnist")],
    *[(f"min_{name}", "--checkpoint-dir") for name in ("FSDP_TP", "PP_FSDP_TP", "Muon")],
    *[(name, "--snapshot-path") for name in ("multigpu_torchrun", "min_Bitwise", "min_Stream", "mnist_DDP")],
    *[(name, "--output") for name in ("mnist_DDP", "mnist_FSDP", "min_GRPO")],
]


@pytest.mark.parametrize(("script", "option"), FOLDERS)
def test_a_folder_is_made_or_one_line_says_why_not(script, option, main_of, launched, tmp_path):
    """A path may be empty, as from a variable that is not set."""
    name = "" if option in ("--checkpoint-dir", "--tensorboard") else "saved.pt"
    assert launched(*words_of(script, option, tmp_path / "new" / "folder" / name))
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        message, stderr = main_of(*words_of(script, option, folder / name))
        assert re.fullmatch(f"{option}: cannot write to {folder}: (File exists|Not a directory)", message)
        assert stderr == ""
    assert (tmp_path / "file").read_text() == "in the way"
    message, stderr = main_of(*words_of(script, option, ""))
    assert message.startswith(f"{option}: ") and "''" in message and stderr == ""


@pytest.mark.parametrize(
    ("script", "option"),
    [("mnist_DDP", "output"), ("min_FSDP", "checkpoint-dir"), ("multigpu_torchrun", "snapshot-path")],
)
def test_a_path_may_begin_with_the_home_folder(script, option, launched, monkeypatch, tmp_path):
    """No shell replaces the ~ in --output=~/model.pt."""
    monkeypatch.setenv("HOME", str(tmp_path))
    args = launched(*words_of(script, f"--{option}=~/{script}/file")).args[1]
    assert getattr(args, option.replace("-", "_")) == f"{tmp_path}/{script}/file"
