"""The options of all scripts: a mistake is one line, before any process is started; --help shows every default."""

import argparse
import importlib
import re
import runpy
import sys
from unittest import mock

import pytest
import torch
from conftest import ROOT

import distributed as dist
import options
import single_gpu

TRANSFORMERS = [
    "min_FSDP_TP",
    "min_PP_FSDP_TP",
    "min_CP",
    "min_DiLoCo",
    "min_EP",
    "min_EP_FSDP",
    "min_FSDP",
    "min_Join",
    "min_Muon",
    "min_PP",
]
TRANSFORMERS += [
    "min_DDP_scratch",
    "min_Packing",
    "min_CP_ring",
    "min_Stream",
    "min_TP",
    "min_ZeRO",
    "min_FSDP_scratch",
]
NPROC = ["llm_FSDP", "min_GRPO", "mnist_DDP", "mnist_FSDP", *TRANSFORMERS]
POSITIONAL = {"multigpu_torchrun": ["5", "1"], "multinode_torchrun": ["5", "1"]}
SCRIPTS = [*NPROC, "min_FaultTolerant", "min_Generate", "rpc_param_server", "rpc_model_parallel"]
MAY_BE_0 = {
    "weight-decay",
    "bucket-mb",
    "seed",
    "least",
    "clip",
    "num-workers",
    "max-restarts",
    "outer-momentum",
    "warmup",
}
MAY_BE_0 |= {"imitation-steps", "low", "high", "kl"}  # of min_GRPO
WITHOUT_DEFAULT = {
    "checkpoint-dir",
    "output",
    "tensorboard",
    "snapshot-path",
    "layers",
}  # left out, nothing is done
WITHOUT_DEFAULT |= {"model", "prompts"}  # of min_Generate, which needs them
PATHS = {"snapshot-path", "data-dir", "checkpoint-dir", "tensorboard", "output"}
PATHS |= {"model", "data", "eval-data", "chat-template"}
TEXTS = {("min_Generate", name) for name in ("model", "prompts", "output", "stop")}
ZEROS = {("min_Generate", "temperature")}

# As typed into a shell, and a line that would answer. Its options, values and numbers must be in the one that does.
REFUSED = {
    "min_DDP.py": """
        --batch_size=-1 | argument --batch-size/--batch_size: '-1' is not a whole number of at least 1
        --epochs 0 | argument --epochs: '0' is not a whole number of at least 1
        --seed x | argument --seed: invalid int value: 'x'
        --nproc a_b | argument --nproc: 'a_b' is not a whole number of at least 1
        --frobnicate | unrecognized arguments: --frobnicate
    """,
    "single_gpu.py": """
        -5 1 | argument total_epochs: '-5' is not a whole number of at least 1
        5 0 | argument save_every: '0' is not a whole number of at least 1
        5 1 --batch-size 0 | argument --batch-size/--batch_size: '0' is not a whole number of at least 1
        5 1 --batch_size=2.5 | argument --batch-size/--batch_size: '2.5' is not a whole number of at least 1
    """,
    "multigpu_torchrun.py": """
        0 1 | argument total_epochs: '0' is not a whole number of at least 1
        5 -1 | argument save_every: '-1' is not a whole number of at least 1
    """,
    "multinode_torchrun.py": """
        5 0 | argument save_every: '0' is not a whole number of at least 1
        RANK=0 WORLD_SIZE=3 5 1 --global-batch-size 2 | argument --global-batch-size: 2 is less than 3, the number of \
ranks
        5 1 --num-workers -1 | argument --num-workers: -1 is less than 0
    """,
    "min_FSDP.py": """
        --nproc 3 --global-batch-size 16 | argument --global-batch-size: 16 is not a multiple of 3, the number of \
processes
        --bf16 | argument --bf16: one process gathers nothing, use at least 2 (--nproc 2)
    """,
    "mnist_FSDP.py": """
        --strategy local --nproc 2 | argument --strategy: local trains in 1 process, not in 2
        RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 --strategy local | argument --strategy: local trains in 1 process, not in 2
    """,
    "llm_FSDP.py": """
        --model folder | argument --data: name the .jsonl files on which --model is trained
        --from-scratch | argument --from-scratch: name the --model whose configuration and tokenizer are taken
        --lora 4 | argument --lora: adapters need a --model with weights
        --model folder --data a --lora 4 --from-scratch | argument --lora: adapters need a --model with weights
        --lora-alpha 2 | argument --lora-alpha: it scales adapters, so it needs --lora
        --length 1 | argument --length: '1' is not a whole number of at least 2
        --nproc 2 --global-batch-size 1 | argument --global-batch-size: 1 is less than 2, the number of processes
    """,
    "mnist_DDP.py": """
        --clip -1 | argument --clip: '-1' is not a number of at least 0
        --data cifar | argument --data: invalid choice: 'cifar' (choose from 'synthetic', 'mnist')
        --nproc 64 --accumulate 4 | argument --global-batch-size: 128 is less than 256, the micro-batches of \
64 x --accumulate 4
    """,
    "flyte_workflow.py": """
        --epochs 0 | argument --epochs: '0' is not a whole number of at least 1
        --nproc 2 | unrecognized arguments: --nproc 2
    """,
    "min_DDP_scratch.py": """
        --compress powersgd | argument --compress: invalid choice: 'powersgd' (choose from 'none', 'bf16')
        --nproc 2 --accumulate 3 --global-batch-size 16 | argument --global-batch-size: 16 is not a multiple of 6, \
the number of processes times --accumulate
    """,
    "min_FSDP_TP.py": """
        --heads 3 --width 128 | argument --width: 128 is not a multiple of 3, the number of heads
        --length 1 | argument --length: '1' is not a whole number from 2 to 65536
        --nproc 4 --replicate 2 --shard 4 | argument --nproc: 4 is not --replicate 2 x --shard 4 x --tensor 1
        --nproc 3 --tensor 2 | argument --nproc: 3 is not --replicate 1 x --shard 1 x --tensor 2
        --nproc 2 --replicate 2 --tensor 2 | argument --nproc: 2 is not --replicate 2 x --shard 1 x --tensor 2
        --nproc 4 --replicate 2 --global-batch-size 6 | argument --global-batch-size: 6 is not a multiple of 4, \
--replicate x --shard
        --nproc 3 --tensor 3 --heads 4 | argument --heads: 4 is not a multiple of 3, --tensor
        --nproc 2 --tensor 2 --length 31 | argument --length: 31 is not a multiple of 2, --tensor
    """,
    "min_CP.py": """
        --nproc 2 --heads 1 | argument --heads: 1 is not a multiple of 2, the number of processes
        --nproc 3 --length 128 | argument --length: 128 is not a multiple of 3, the number of processes
        --nproc 3 --length 128 --attention all-gather | argument --length: 128 is not a multiple of 3, the number \
of processes
    """,
    "min_DiLoCo.py": """
        --outer-momentum 1 | argument --outer-momentum: '1' is not a number of at least 0 and below 1
        --nproc 3 --global-batch-size 16 | argument --global-batch-size: 16 is not a multiple of 3, the number of \
processes
    """,
    "min_EP.py": """
        --nproc 2 --experts 5 | argument --experts: 5 is not a multiple of 2, the number of processes
        --nproc 2 --top 9 | argument --top: 9 is more than the 8 experts
        --nproc 3 --global-batch-size 16 | argument --global-batch-size: 16 is not a multiple of 3, the number of \
processes
    """,
    "min_EP_FSDP.py": """
        --nproc 4 --expert-parallel 3 | argument --expert-parallel: 3 does not divide 4, the number of processes
        --nproc 4 --expert-parallel 4 --experts 6 | argument --experts: 6 is not a multiple of 4, --expert-parallel
        --nproc 2 --top 9 | argument --top: 9 is more than the 8 experts
    """,
    "min_GRPO.py": """
        --nproc 3 --prompts 2 | argument --prompts: 2 is less than 3, the number of processes
        --samples 1 | argument --samples: '1' is not a whole number of at least 2
        --temperature 0 | argument --temperature: '0' is not a number of at least 0.01
    """,
    "min_FaultTolerant.py": """
        --timeout 0 | argument --timeout: '0' is not a whole number of at least 1
    """,
    "min_Join.py": """
        --steps 20 --least 21 | argument --least: 21 is not a whole number from 0 to 20, the --steps
        --nproc 3 --global-batch-size 16 | argument --global-batch-size: 16 is not a multiple of 3, the number of \
processes
    """,
    "min_PP.py": """
        --nproc 4 --data-parallel 3 | argument --data-parallel: 3 does not divide 4, the number of processes
        --nproc 1 --data-parallel 2 | argument --data-parallel: 2 does not divide 1, the number of processes
        --nproc 5 --layers 4 | argument --layers: 4 is less than 5, the stages of 1F1B
        --nproc 2 --schedule DualPipeV --layers 3 | argument --layers: 3 is less than 4, the stages of DualPipeV
        --nproc 2 --micro-batches 1 | argument --micro-batches: 1 is less than 2, the stages of 1F1B
        --nproc 2 --schedule DualPipeV --micro-batches 2 | argument --micro-batches: 2 is less than 4, the stages of \
DualPipeV
        --nproc 2 --schedule Interleaved1F1B --micro-batches 5 | argument --micro-batches: 5 is not a multiple of 2, \
the processes of a pipeline
        --nproc 2 --schedule InterleavedZeroBubble --micro-batches 3 | argument --micro-batches: 3 is not a multiple \
of 2, the processes of a pipeline
        --nproc 2 --global-batch-size 12 --micro-batches 4 --data-parallel 2 | argument --global-batch-size: 12 is \
not a multiple of 8, --micro-batches x --data-parallel
    """,
    "min_TP.py": """
        --nproc 3 --heads 4 | argument --heads: 4 is not a multiple of 3, the number of processes
        --nproc 2 --length 9 | argument --length: 9 is not a multiple of 2, the number of processes
        --heads 3 --width 128 | argument --width: 128 is not a multiple of 3, the number of heads
    """,
    "min_ZeRO.py": """
        --nproc 3 --global-batch-size 16 | argument --global-batch-size: 16 is not a multiple of 3, the number of \
processes
        --nproc 2 --global-batch-size 1 | argument --global-batch-size: 1 is not a multiple of 2, the number of \
processes
    """,
    "rpc_model_parallel.py": """
        --global-batch-size 4 --micro-batches 5 | argument --micro-batches: 5 is not in the range 1 to 4, the \
--global-batch-size
    """,
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", REFUSED)
def test_a_mistake_is_one_line(script, main_of, monkeypatch):
    for line in REFUSED[script].strip().splitlines():
        if "DualPipeV" in line and torch.__version__ < "2.12":
            continue  # there min_PP.py refuses the schedule itself
        typed, message = line.strip().split(" | ")
        variables = re.findall(r"([A-Z_]+)=(\d+)", typed)
        options = [word for word in typed.split() if not re.match("[A-Z_]+=", word)]
        with monkeypatch.context() as patch:
            for name, value in variables:
                patch.setenv(name, value)
            status, stderr = main_of(script, *options)
        assert status == 2 and stderr.startswith(f"{script}: error: ") and stderr.count("\n") == 1
        for word in essential(message):
            assert word in stderr, f"{typed}: {word!r}"


def essential(message):
    """What must be in the line of a mistake, whatever its words are: options, values and numbers."""
    return re.findall(r"--[a-z-]+|'.*?'|[0-9.]*[0-9]", message)


def exit_of(module, capsys, monkeypatch, *options):
    """Status, stdout and stderr with which parse_args leaves."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *POSITIONAL.get(module.__name__, []), *options])
    with pytest.raises(SystemExit) as exit_info:
        module.parse_args()
    return exit_info.value.code, *capsys.readouterr()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_usage_and_all_defaults_and_every_number_and_choice_is_checked(script, capsys, monkeypatch):
    module = importlib.import_module(script)
    status, help_text, _ = exit_of(module, capsys, monkeypatch, "--help")
    assert status == 0 and help_text.startswith(f"usage: {script}.py [-h] ")
    assert "".join(module.__doc__.partition("\n")[0].split()) in "".join(help_text.split())
    _, _, *options = re.split(r"\n  (?=-)", help_text.partition("\noptions:")[2])
    assert len(options) >= 2
    for option in options:
        name, value = re.match(r"--([\w-]+)(?:, --no-[\w-]+)?( \S+)?\s", option).groups()
        assert "(default:" in option or name in WITHOUT_DEFAULT, option
        if value and name not in PATHS and (script, name) not in TEXTS:
            may_not_be_0 = name not in MAY_BE_0 and (script, name) not in ZEROS
            for wrong in ("x", "nan", "-1", *(["0"] if may_not_be_0 else [])):
                status, stdout, stderr = exit_of(module, capsys, monkeypatch, f"--{name}={wrong}")
                assert (status, stdout, stderr.count("\n")) == (2, "", 1), f"{name} {wrong}"
                assert stderr.startswith(f"{script}.py: error: argument --{name}: ") and wrong in stderr


def launched(monkeypatch, script, *options):
    """With what the script calls `launch`."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *POSITIONAL.get(script, []), *map(str, options)])
    monkeypatch.setattr(dist, "launch", launch := mock.Mock())
    runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    return launch.call_args


@pytest.mark.parametrize("script", NPROC)
def test_nproc_is_the_number_of_processes(script, main_of, monkeypatch):
    for gpus, given, nprocs in ((0, (), 1), (0, ("--nproc", 4), 4), (4, (), 4), (4, ("--nproc", 1), 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert launched(monkeypatch, script, *given).kwargs == {"nprocs": nprocs}
    message = "argument --nproc: '8' is not a whole number from 1 to 4"
    assert main_of(f"{script}.py", "--nproc", "8") == (2, f"{script}.py: error: {message}\n")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert launched(monkeypatch, script).kwargs == {"nprocs": 4}, "the launcher's number"
    assert launched(monkeypatch, script, "--nproc", 2).kwargs == {"nprocs": 2}, "which `launch` refuses"
    message = "argument --nproc: '0' is not a whole number of at least 1"
    assert main_of(f"{script}.py", "--nproc", "0") == (2, f"{script}.py: error: {message}\n")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launched(monkeypatch, script).kwargs == {"nprocs": 4}, "on two machines with two GPUs each"


@pytest.mark.parametrize("script", ["min_FSDP_TP", "min_CP", "min_DiLoCo", "min_Join", "min_ZeRO"])
def test_defaults_suit_any_number_of_processes(script, monkeypatch):
    options = {"min_FSDP_TP": [(), ("--tensor", 0), ("--replicate", 0)], "min_CP": [(), ("--attention", "all-gather")]}
    for nproc in (*range(1, 9), 16):
        for given in options.get(script, [()]):
            given = [nproc if value == 0 else value for value in given]
            args = launched(monkeypatch, script, "--nproc", nproc, *given).args[1]
            assert args.nproc == nproc and args.width % args.heads == 0
            assert 16 <= args.global_batch_size < 16 + nproc and 128 <= args.width <= 160 and 4 <= args.heads <= 16
            shares = nproc // getattr(args, "tensor", 1)
            if script == "min_CP":
                assert args.length % nproc == 0 and (given or args.heads % nproc == 0)
            else:
                assert args.global_batch_size % shares == 0
            if script == "min_FSDP_TP":
                assert args.replicate * args.shard * args.tensor == nproc
                assert args.heads % args.tensor == args.length % args.tensor == 0
    assert getattr(launched(monkeypatch, script, "--steps", 4).args[1], "least", 3) == 3, "three quarters"


def test_other_numbers_of_processes(monkeypatch):
    assert launched(monkeypatch, "mnist_FSDP", "--strategy", "local").kwargs == {"nprocs": 1}
    assert launched(monkeypatch, "rpc_model_parallel").kwargs == {"nprocs": 2}
    assert launched(monkeypatch, "rpc_param_server", "--trainers", 4).kwargs["nprocs"] == 5
    for gpus, layers in ((0, 4), (2, 4), (8, 8)):  # enough for a stage on each
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert launched(monkeypatch, "min_PP").args[1].layers == layers


@pytest.mark.parametrize("wrong", ["inf", "nan", "0", "-1", "1e999"])
def test_a_positive_number_is_finite(wrong, capsys):
    parser = options.ArgumentParser("What the script does.\n")
    parser.add_argument("--lr", type=options.positive_number)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--lr={wrong}"])
    assert capsys.readouterr().err == f"{parser.prog}: error: argument --lr: '{wrong}' is not a finite number above 0\n"


def test_an_option_may_be_typed_with_underscores(monkeypatch):
    parser = options.ArgumentParser("What the script does.\n")
    parser.add_argument("steps", type=int)
    parser.add_argument("--test-batch-size", type=options.whole_number(1))
    parser.add_argument("--model-file")
    parser.add_argument("--use-fast-path", action=argparse.BooleanOptionalAction)
    typed = ["50", "--test_batch_size", "10", "--model_file=my_model--a_b.pt", "--no_use_fast_path"]
    expected = {"steps": 50, "test_batch_size": 10, "model_file": "my_model--a_b.pt", "use_fast_path": False}
    assert vars(parser.parse_args(typed)) == expected
    monkeypatch.setattr(sys, "argv", ["script.py", *typed])
    assert vars(parser.parse_args()) == expected
    typed = ["50", "--test-batch-size=10", "--model-file", "my_model--a_b.pt", "--no-use-fast-path"]
    assert vars(parser.parse_args(typed)) == expected


FOLDERS = [
    ("llm_FSDP", "--output", ""),
    ("llm_FSDP", "--checkpoint-dir", ""),
    ("llm_FSDP", "--tensorboard", ""),
    ("multigpu_torchrun", "--snapshot-path", "snapshot.pt"),
    ("multinode_torchrun", "--snapshot-path", "snapshot.pt"),
    ("min_FSDP", "--checkpoint-dir", ""),
    ("mnist_FSDP", "--checkpoint-dir", ""),
    ("mnist_FSDP", "--output", "model.pt"),
    ("mnist_DDP", "--output", "model.pt"),
    ("mnist_DDP", "--snapshot-path", "snapshot.pt"),
    ("mnist_DDP", "--tensorboard", ""),
    ("min_FSDP_TP", "--checkpoint-dir", ""),
    ("min_GRPO", "--output", "model.pt"),
]


@pytest.mark.parametrize(("script", "option", "name"), FOLDERS)
def test_a_folder_is_made_or_one_line_says_why_not(script, option, name, main_of, tmp_path, monkeypatch):
    assert launched(monkeypatch, script, option, tmp_path / "new" / "folder" / name)
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        message, stderr = main_of(f"{script}.py", *POSITIONAL.get(script, []), option, str(folder / name))
        assert re.fullmatch(f"{option}: cannot write to {folder}: (File exists|Not a directory)", message)
        assert stderr == ""
    assert (tmp_path / "file").read_text() == "in the way"


SAVING = {
    "llm_FSDP.py": "--checkpoint-dir",
    "min_FSDP_TP.py": "--checkpoint-dir",
    "min_PP_FSDP_TP.py": "--checkpoint-dir",
    "min_FSDP.py": "--checkpoint-dir",
    "mnist_FSDP.py": "--checkpoint-dir",
    "min_Muon.py": "--checkpoint-dir",
    "min_Stream.py": "--snapshot-path",
    "mnist_DDP.py": "--snapshot-path",
    "min_GRPO.py": "--output",
}


@pytest.mark.parametrize("script", SAVING)
def test_an_empty_path_is_one_line(script, main_of):
    """As from a variable that is not set. Without a path nothing is saved."""
    message, stderr = main_of(script, SAVING[script], "")
    assert re.match(f"{SAVING[script]}: (cannot write to |'' is not the name of a file$)", message) and stderr == ""


def test_single_gpu_says_so_when_it_saves(monkeypatch):
    monkeypatch.chdir("/sys")
    monkeypatch.setattr(sys, "argv", ["single_gpu.py", "1", "1"])
    with pytest.raises(SystemExit, match=r"^cannot save /sys/checkpoint\.pt: [^\n]*$"):
        single_gpu.main(single_gpu.parse_args())
