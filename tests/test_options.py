"""The options of all scripts: a mistake is one line, before any process is started; --help shows every default."""

import argparse
import importlib
import re

import pytest
import torch
from conftest import guards

import options

TRANSFORMERS = [f"min_{name}" for name in ("FSDP_TP", "PP_FSDP_TP", "CP", "DiLoCo", "EP", "EP_FSDP", "FSDP", "Join")]
TRANSFORMERS += [
    f"min_{name}" for name in ("Muon", "PP", "DDP_scratch", "Packing", "CP_ring", "CP_packed", "Stream", "TP", "ZeRO")
]
TRANSFORMERS += ["min_FSDP_scratch"]
NPROC = ["llm_FSDP", "min_GRPO", "mnist_DDP", "mnist_FSDP", *TRANSFORMERS]
POSITIONAL = {"multigpu_torchrun": ["5", "1"], "multinode_torchrun": ["5", "1"]}
SCRIPTS = [*NPROC, "min_FaultTolerant", "min_Generate", "rpc_param_server", "rpc_model_parallel"]
MAY_BE_0 = {"weight-decay", "bucket-mb", "seed", "least", "clip", "num-workers", "max-restarts", "outer-momentum"}
MAY_BE_0 |= {"warmup"}
MAY_BE_0 |= {"imitation-steps", "clip-low", "clip-high"}  # of min_GRPO
# Left out, nothing is done.
WITHOUT_DEFAULT = {"checkpoint-dir", "output", "tensorboard", "snapshot-path", "layers"}
WITHOUT_DEFAULT |= {"model", "prompts"}  # of min_Generate, which needs them
PATHS = {"snapshot-path", "data-dir", "checkpoint-dir", "tensorboard", "output"}
PATHS |= {"model", "data", "eval-data", "chat-template"}
TEXTS = {("min_Generate", name) for name in ("model", "prompts", "output")}
ZEROS = {("min_Generate", "temperature")}

# As typed into a shell, and the options, values and numbers that must be in the line that answers, the wrong one first.
FLYTE = "flyte_workflow.py"  # whose import takes seconds
REFUSED = {
    "min_DDP.py": """
        --batch_size=-1 | --batch-size/--batch_size '-1' 1
        --nproc a_b | --nproc 'a_b'
        --frobnicate | --frobnicate
    """,
    "single_gpu.py": """
        -5 1 | total_epochs '-5' 1
        5 0 | save_every '0' 1
        5 1 --batch_size=2.5 | --batch-size/--batch_size '2.5'
    """,
    "multigpu_torchrun.py": """
        0 1 | total_epochs '0' 1
        5 -1 | save_every '-1' 1
    """,
    "multinode_torchrun.py": """
        5 0 | save_every '0' 1
        RANK=0 WORLD_SIZE=3 5 1 --global-batch-size 2 | --global-batch-size 2 3
        5 1 --num-workers -1 | --num-workers -1 0
    """,
    "min_FSDP.py": """
        --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
    """,
    "mnist_FSDP.py": """
        --strategy local --nproc 2 | --strategy local 1 2
        RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 --strategy local | --strategy local 1 2
        RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 --strategy local --nproc 1 | --strategy local 1 2
    """,
    "llm_FSDP.py": """
        --model folder | --model --data
        --from-scratch | --from-scratch --model
        --chat-template t | --chat-template
        --lora 4 | --lora --model
        --model folder --data a --lora 4 --from-scratch | --lora --model
        --model folder --data a --lora-alpha 2 | --lora-alpha --lora
        --model folder --data a --nf4 | --nf4 --lora
        --model folder --data rows.npy | --data --eval-data
        --model folder --data rows.npy --eval-data held-out.npy --pad | --data --pad --length
        --model folder --data rows.npy --eval-data held-out.npy --length 64 | --data --pad --length
        --output / | --output /
        --length 1 | --length '1' 2
    """,
    "mnist_DDP.py": """
        --clip -1 | --clip '-1' 0
        --clip one | --clip 'one' 0
        --lr fast | --lr 'fast' 0
        --data cifar | --data 'cifar' 'synthetic' 'mnist'
        --nproc 64 --accumulate 4 | --global-batch-size 128 256 64 --accumulate 4
        --snapshot-path a.pt --output ./a.pt | --output ./a.pt --snapshot-path
    """,
    FLYTE: """
        --epochs 0 | --epochs '0' 1
        --nproc 2 | --nproc 2
    """,
    "min_DDP_scratch.py": """
        --nproc 2 --accumulate 3 --global-batch-size 16 | --global-batch-size 16 6 --accumulate
    """,
    "min_FSDP_TP.py": """
        --heads 3 --width 128 | --width 128 3
        --length 1 | --length '1' 2 65536
        --nproc 4 --replicate 2 --shard 4 | --nproc 4 --replicate 2 --shard 4 --tensor 1
        --nproc 3 --tensor 2 | --nproc 3 --replicate 1 --shard 1 --tensor 2
        --nproc 4 --replicate 2 --global-batch-size 6 | --global-batch-size 6 4 --replicate --shard
        --nproc 3 --tensor 3 --heads 4 | --heads 4 3 --tensor
        --nproc 2 --tensor 2 --length 31 | --length 31 2 --tensor
    """,
    "min_Bitwise.py": """
        --nproc 3 | --nproc 3
        --nproc 4 --global-batch-size 6 | --global-batch-size 6 4
    """,
    "min_CP.py": """
        --nproc 2 --heads 1 | --heads 1 2
        --nproc 3 --length 128 --attention all-gather | --length 128 3
    """,
    "min_DiLoCo.py": """
        --outer-momentum 1 | --outer-momentum '1' 0 1
        --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
    """,
    "min_EP.py": """
        --nproc 2 --experts 5 | --experts 5 2
        --nproc 2 --top 9 | --top 9 8
        --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
    """,
    "min_EP_FSDP.py": """
        --nproc 4 --expert-parallel 3 | --expert-parallel 3 4
        --nproc 4 --expert-parallel 4 --experts 6 | --experts 6 4 --expert-parallel
        --nproc 2 --top 9 | --top 9 8
    """,
    "min_GRPO.py": """
        --nproc 3 --prompts 2 | --prompts 2 3
        --group-size 1 | --group-size '1' 2
        --temperature 0 | --temperature '0' 0.01
    """,
    "min_FaultTolerant.py": """
        --timeout 0 | --timeout '0' 1
    """,
    "min_Packing.py": """
        --nproc 2 --accumulate 3 --global-batch-size 16 | --global-batch-size 16 6 --accumulate
    """,
    "min_Join.py": """
        --steps 20 --least 21 | --least 21 0 20 --steps
        --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
    """,
    "min_PP.py": """
        --nproc 5 --layers 4 | --layers 4 5 1F1B
        --nproc 2 --schedule DualPipeV --layers 3 | --layers 3 4 DualPipeV
        --nproc 2 --micro-batches 1 | --micro-batches 1 2 1F1B
        --nproc 2 --schedule DualPipeV --micro-batches 2 | --micro-batches 2 4 DualPipeV
        --nproc 2 --schedule Interleaved1F1B --micro-batches 5 | --micro-batches 5 2
        --nproc 2 --global-batch-size 12 --micro-batches 8 | --global-batch-size 12 8 --micro-batches
    """,
    "min_TP.py": """
        --nproc 3 --heads 4 | --heads 4 3
        --nproc 2 --length 9 | --length 9 2
        --heads 3 --width 128 | --width 128 3
    """,
    "min_ZeRO.py": """
        --nproc 3 --global-batch-size 16 | --global-batch-size 16 3
    """,
    "rpc_model_parallel.py": """
        --global-batch-size 4 --micro-batches 5 | --micro-batches 5 1 4 --global-batch-size
    """,
}


@pytest.fixture(autouse=True)
def no_gpu(gpus, monkeypatch, tmp_path):
    gpus(0)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", [*(script for script in REFUSED if script != FLYTE), *guards(FLYTE)])
def test_a_mistake_is_one_line(script, main_of, monkeypatch):
    for line in REFUSED[script].strip().splitlines():
        if "DualPipeV" in line and torch.__version__ < "2.12":
            continue  # there min_PP.py refuses the schedule itself
        typed, expected = line.strip().split(" | ")
        variables = re.findall(r"([A-Z_]+)=(\d+)", typed)
        options = [word for word in typed.split() if not re.match("[A-Z_]+=", word)]
        with monkeypatch.context() as patch:
            for name, value in variables:
                patch.setenv(name, value)
            status, stderr = main_of(script, *options)
        assert status == 2 and stderr.startswith(f"{script}: error: ") and stderr.count("\n") == 1
        first, *others = expected.split()
        assert f"argument {first}: " in stderr or f"unrecognized arguments: {first}" in stderr, typed
        assert all(word in stderr for word in others), f"{typed}: {stderr}"


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
        if value and name not in PATHS and (script, name) not in TEXTS:
            may_not_be_0 = name not in MAY_BE_0 and (script, name) not in ZEROS
            for wrong in ("x", "nan", "-1", *(["0"] if may_not_be_0 else [])):
                status, stdout, stderr = exit_of(f"--{name}={wrong}")
                assert (status, stdout, stderr.count("\n")) == (2, "", 1), f"{name} {wrong}"
                assert stderr.startswith(f"{script}.py: error: argument --{name}: ") and wrong in stderr


@pytest.mark.parametrize("script", NPROC)
def test_nproc_is_the_number_of_processes(script, main_of, launched, gpus, monkeypatch):
    for visible, given, nprocs in ((0, (), 1), (0, ("--nproc", 4), 4), (4, (), 4), (4, ("--nproc", 1), 1)):
        gpus(visible)
        assert launched(*words_of(script, *given)).kwargs == {"nprocs": nprocs}
    status, line = main_of(f"{script}.py", "--nproc", "8")
    assert status == 2 and "argument --nproc: '8' " in line and " 4\n" in line
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    for visible in (0, 2):  # as on two machines with two GPUs each
        gpus(visible)
        assert launched(*words_of(script)).kwargs == {"nprocs": 4}, "the launcher's number"
    assert launched(*words_of(script, "--nproc", 2)).kwargs == {"nprocs": 2}, "which `launch` refuses"
    assert "argument --nproc: '0' " in main_of(f"{script}.py", "--nproc", "0")[1]


@pytest.mark.parametrize("script", TRANSFORMERS)
def test_defaults_suit_any_number_of_processes(script, launched):
    """The script itself would refuse what does not fit."""
    options = {"min_FSDP_TP": [(), ("--tensor", 0), ("--replicate", 0)], "min_CP": [(), ("--attention", "all-gather")]}
    for nproc in (*range(1, 9), 16):
        for given in options.get(script, [()]):
            given = [nproc if value == 0 else value for value in given]
            args = launched(f"{script}.py", "--nproc", nproc, *given).args[1]
            assert args.nproc == nproc and args.width % args.heads == 0
            assert args.global_batch_size >= 16 and args.width >= 128 and args.heads >= 4
    assert getattr(launched(f"{script}.py", "--steps", 4).args[1], "least", 3) == 3, "three quarters"


def test_other_numbers_of_processes(launched, gpus):
    assert launched("mnist_FSDP.py", "--strategy", "local").kwargs == {"nprocs": 1}
    assert launched("rpc_model_parallel.py").kwargs == {"nprocs": 2}
    assert launched("rpc_param_server.py", "--trainers", 4).kwargs["nprocs"] == 5
    for visible, layers in ((0, 4), (2, 4), (8, 8)):  # enough for a stage on each
        gpus(visible)
        assert launched("min_PP.py").args[1].layers == layers


@pytest.mark.parametrize("wrong", ["inf", "nan", "0", "-1", "1e999"])
def test_a_positive_number_is_finite(wrong, capsys):
    parser = options.ArgumentParser("What the script does.\n")
    parser.add_argument("--lr", type=options.positive_number)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--lr={wrong}"])
    assert capsys.readouterr().err == f"{parser.prog}: error: argument --lr: '{wrong}' is not a finite number above 0\n"


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


FOLDERS = [  # where scripts save, and the name of a file there
    *[("llm_FSDP", option, "") for option in ("--checkpoint-dir", "--tensorboard")],
    ("llm_FSDP", "--output", "result"),
    *[(f"min_{name}", "--checkpoint-dir", "") for name in ("FSDP", "FSDP_TP", "PP_FSDP_TP", "Muon")],
    ("mnist_FSDP", "--checkpoint-dir", ""),
    ("multigpu_torchrun", "--snapshot-path", "snapshot.pt"),
    *[(script, "--snapshot-path", "snapshot.pt") for script in ("min_Bitwise", "min_Stream")],
    ("mnist_DDP", "--snapshot-path", "snapshot.pt"),
    *[(script, "--output", "model.pt") for script in ("mnist_DDP", "mnist_FSDP", "min_GRPO")],
]


@pytest.mark.parametrize(("script", "option", "name"), FOLDERS)
def test_a_folder_is_made_or_one_line_says_why_not(script, option, name, main_of, launched, tmp_path):
    """A path may be empty, as from a variable that is not set."""
    assert launched(*words_of(script, option, tmp_path / "new" / "folder" / name))
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("in the way")
    words = words_of(script, option)
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        message, stderr = main_of(*words, str(folder / name))
        assert re.fullmatch(f"{option}: cannot write to {folder}: (File exists|Not a directory)", message)
        assert stderr == ""
    assert (tmp_path / "file").read_text() == "in the way"
    message, stderr = main_of(*words, "")
    assert re.match(f"{option}: (cannot write to |'' is not the name of a file$)", message) and stderr == ""


@pytest.mark.parametrize(
    ("script", "option"),
    [("mnist_DDP", "output"), ("min_FSDP", "checkpoint-dir"), ("multigpu_torchrun", "snapshot-path")],
)
def test_a_path_may_begin_with_the_home_folder(script, option, launched, monkeypatch, tmp_path):
    """No shell replaces the ~ in --output=~/model.pt."""
    monkeypatch.setenv("HOME", str(tmp_path))
    args = launched(*words_of(script, f"--{option}=~/{script}/file")).args[1]
    assert getattr(args, option.replace("-", "_")) == f"{tmp_path}/{script}/file"


def test_single_gpu_says_so_when_it_saves(main_of, monkeypatch):
    monkeypatch.chdir("/sys")
    message, _ = main_of("single_gpu.py", "1", "1")
    assert re.fullmatch(r"cannot save /sys/checkpoint\.pt: .*", message)


def test_without_docstrings_the_help_has_no_description():
    """As under `python -OO`."""
    assert options.ArgumentParser(None).format_help().startswith("usage: ")
