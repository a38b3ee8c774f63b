"""Every schedule trains as one process does; a process holds its stages alone, and sends what the docstring says."""

import contextlib
import gc
import io
import json
import re
from pathlib import Path

import pytest
import torch
import transformer
from conftest import torchrun
from torch import nn
from torch.nn import functional as F

import distributed as dist
import gpt
import min_PP

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
CLIP = 0.5


@pytest.fixture(autouse=True)
def one_thread():
    """Several would only wait for each other, on matrices as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case(optimizer, schedule, micro_batches=4, data_parallel=1, **changes):
    return optimizer, {"schedule": schedule, "micro_batches": micro_batches, "data_parallel": data_parallel}, changes


CASES = {
    1: [case("AdamW", "1F1B"), case("SGD", "ZBVZeroBubble", clip=CLIP), case("SGD", "DualPipeV")],
    2: [
        *[case("AdamW", schedule) for schedule in SCHEDULES],
        *[case("SGD", schedule, clip=CLIP) for schedule in SCHEDULES],
        case("SGD", "1F1B", 2, layers=5),  # stages of two and three blocks
        case("AdamW", "GPipe", 1, data_parallel=2),
        case("SGD", "GPipe", 8, clip=CLIP),
    ],
    4: [
        case("AdamW", "1F1B"),
        case("SGD", "1F1B", clip=CLIP),
        case("SGD", "GPipe", 2),  # fewer than stages
        *[case("SGD", schedule, 8, clip=CLIP, layers=8) for schedule in SCHEDULES[2:]],
        case("AdamW", "1F1B", data_parallel=2),
        case("SGD", "1F1B", data_parallel=2),
        case("SGD", "1F1B", data_parallel=2, clip=CLIP),
        case("SGD", "ZBVZeroBubble", 2, data_parallel=2, clip=CLIP),
    ],
}


def whole_model(pipeline):
    """All parameters by name, as saved on the first pipeline, of whose stages no two hold the same one."""
    own = {name: param.detach() for stage in pipeline.stages.values() for name, param in stage.named_parameters()}
    assert sum(param.numel() for param in own.values()) == sum(param.numel() for param in pipeline.params)
    replicas, processes = pipeline.mesh.shape
    everyone = dist.agree(own)
    assert sum(map(len, everyone)) == replicas * len(set().union(*everyone)), "each once in every pipeline"
    for rank, theirs in enumerate(everyone):  # the same in every pipeline
        first = everyone[rank % processes]
        assert theirs.keys() == first.keys() and all(torch.equal(theirs[name], first[name]) for name in theirs)
    return {name: param for theirs in everyone[:processes] for name, param in theirs.items()}


def train_worker(local_rank, world_size, folder):
    """Each case by the script's own train; rank 0 saves losses, parameters, and the last held-out loss it printed."""
    dist.init_process_group()
    results = []
    with transformer.float64():
        for optimizer, own, changes in CASES[world_size]:
            args = transformer.arguments(world_size, **own, **changes)
            pipeline = min_PP.Pipeline(transformer.make_model(args), args)
            optimizer = transformer.make_optimizer(optimizer, pipeline.params, args.lr)
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                losses = min_PP.train(pipeline, optimizer, *transformer.small_text(), args)

            batches = gpt.Progress(None, *transformer.small_text(), args).batches
            with torch.no_grad():
                held_out = dist.reduce(torch.stack([pipeline.loss(x, y) for x, y in batches]).mean()).item()
            results.append((losses, whole_model(pipeline), held_out, stdout.getvalue()))
    if dist.is_primary():
        torch.save(results, f"{folder}/results.pt")


def held_out_loss(parameters, args):
    """That of one process with these parameters."""
    with transformer.float64(), torch.no_grad():
        model = transformer.make_model(args)
        model.load_state_dict(parameters)
        batches = gpt.Progress(None, *transformer.small_text(), args).batches
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in batches]
    return sum(losses).item() / len(losses)


@pytest.mark.timeout(300)  # seconds alone; minutes among many other processes
@pytest.mark.parametrize("nprocs", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_process(nprocs, tmp_path):
    dist.launch(train_worker, str(tmp_path), nprocs=nprocs)
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    for (optimizer, own, changes), (losses, parameters, held_out, stdout) in zip(CASES[nprocs], results, strict=True):
        print(nprocs, optimizer, own, changes)
        transformer.assert_equal(losses, parameters, transformer.reference(optimizer, **changes))
        expected = held_out_loss(parameters, transformer.arguments(**changes))
        assert abs(held_out - expected) <= 1e-9
        assert stdout.splitlines()[-1].startswith("step 20 | ") and f"| held-out {expected:.4f} nats" in stdout


def test_the_clipped_cases_are_clipped():
    clipped, free = (transformer.reference("SGD", **changes)[0] for changes in ({"clip": CLIP}, {}))
    assert ((clipped - free).abs() > 1e-3).sum() >= 15


# ---- what a process holds and sends ---------------------------------------------------------------------------------


def hold_worker(local_rank, world_size, folder, args):
    """Save what report_held was given, and the sizes of all parameters that are alive in this process then."""

    def report_held(params, total):
        gc.collect()
        alive = [thing for thing in gc.get_objects() if isinstance(thing, nn.Parameter)]
        sizes = [sum(param.numel() for param in params) for params in (params, alive)]
        Path(f"{folder}/{local_rank}.json").write_text(json.dumps([*sizes, total]))

    dist.init_process_group()
    texts = transformer.small_text()
    gpt.report_held, gpt.load_text = report_held, lambda: texts
    with contextlib.redirect_stdout(io.StringIO()):
        min_PP.main_worker(local_rank, world_size, args)


@pytest.mark.parametrize("nprocs, schedule", [(2, "1F1B"), (4, "GPipe"), (2, "ZBVZeroBubble")])
def test_the_stages_add_up_to_the_model_and_nothing_else_is_held(nprocs, schedule, tmp_path):
    args = transformer.arguments(nprocs, schedule=schedule, micro_batches=4, data_parallel=1, steps=1)
    dist.launch(hold_worker, str(tmp_path), args, nprocs=nprocs)
    total = sum(param.numel() for param in transformer.make_model(args).parameters())
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(nprocs)]
    assert sum(own for own, _, _ in held) == total and all(own == alive for own, alive, _ in held)
    assert all(of == total for _, _, of in held)
    assert max(own for own, _, _ in held) <= 1.5 * total / nprocs, "narrow embeddings are a large part here"


SENT = [  # nprocs, options, and by the docstring, in units of A, the passes over a boundary, and pipelines
    (2, {"schedule": "1F1B", "data_parallel": 1}, 2, 1),
    (2, {"schedule": "GPipe", "data_parallel": 2}, 0, 2),
    (2, {"schedule": "InterleavedZeroBubble", "data_parallel": 1}, 6, 1),
    (2, {"schedule": "ZBVZeroBubble", "data_parallel": 1}, 4, 1),
    (4, {"schedule": "1F1B", "data_parallel": 2}, 2, 2),
]


def train_in_float32(args):
    pipeline = min_PP.Pipeline(transformer.make_model(args), args)
    optimizer = transformer.make_optimizer("SGD", pipeline.params, args.lr)
    with contextlib.redirect_stdout(io.StringIO()):
        min_PP.train(pipeline, optimizer, *transformer.small_text(), args)


def count_worker(local_rank, world_size):
    """Print the bytes of a step, over all processes, of each case."""
    dist.init_process_group()
    for nprocs, own, passes, pipelines in SENT:
        if nprocs == world_size:
            sizes = {"width": 128, "length": 128, "batch_size": 16, "clip": 1.0}
            args = transformer.arguments(nprocs, micro_batches=4, **own, **sizes)
            sent = world_size * transformer.sent_per_step(train_in_float32, args)
            n_params = sum(param.numel() for param in transformer.make_model(args).parameters())
            expected = passes * 4 * 16 * 128 * 128 + 2 * (pipelines - 1) * 4 * n_params
            dist.print_primary(json.dumps([str(own), sent, expected]))


def count():
    """Run in a network namespace of its own."""
    for nprocs in sorted({nprocs for nprocs, *_ in SENT}):
        dist.launch(count_worker, nprocs=nprocs)


@pytest.mark.slow
def test_bytes_sent():
    lines = [json.loads(line) for line in transformer.run_in_namespace("test_min_PP", "count").splitlines()]
    assert len(lines) == len(SENT)
    for own, sent, expected in lines:
        print(f"{own}: {sent:,.0f} bytes, {sent / expected:.4f} of the formula")
        assert sent == pytest.approx(expected, rel=0.03)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ("--nproc 5 --layers 4", "argument --layers: 4 is less than 5, the stages of --schedule 1F1B"),
        ("--schedule DualPipeV --layers 3", "argument --layers: 3 is less than 4, the stages of --schedule DualPipeV"),
        ("--micro-batches 3", "argument --batch-size: 16 is not a multiple of 3, --micro-batches x --data-parallel"),
        (
            "--batch_size 12 --nproc 2 --micro-batches 4 --data-parallel 2",
            "argument --batch-size: 12 is not a multiple of 8, --micro-batches x --data-parallel",
        ),
        ("--micro-batches 1", "argument --micro-batches: 1 is less than 2, the stages of --schedule 1F1B"),
        (
            "--schedule DualPipeV --micro-batches 2",
            "argument --micro-batches: 2 is less than 4, the stages of --schedule DualPipeV",
        ),
        (
            "--schedule Interleaved1F1B --micro-batches 5 --batch-size 5",
            "argument --micro-batches: 5 is not a multiple of 2, the processes of a pipeline",
        ),
        (
            "--nproc 4 --data-parallel 3",
            "argument --data-parallel: 3 is not a divisor of the number of processes, 4",
        ),
        ("--nproc 1 --data-parallel 2", "argument --data-parallel: 2 is not a divisor of the number of processes, 1"),
        ("--micro-batches 0", "argument --micro-batches: '0' is not a whole number of at least 1"),
        ("--data-parallel -1", "argument --data-parallel: '-1' is not a whole number of at least 1"),
        ("--heads 3", "argument --heads: 3 is not a divisor of --width 128"),
    ],
)
def test_bad_options_are_one_line(options, message, main_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main_of("min_PP.py", *options.split()) == (2, f"min_PP.py: error: {message}\n")


def test_an_unknown_schedule_is_one_line(main_of):
    status, error = main_of("min_PP.py", "--schedule", "2F2B")
    assert status == 2 and error.count("\n") == 1 and "'2F2B'" in error
    assert all(schedule in error for schedule in SCHEDULES)


def test_the_default_layers_are_enough_for_all_gpus(monkeypatch):
    monkeypatch.setattr("sys.argv", ["min_PP.py"])
    for gpus, layers in ((0, 4), (2, 4), (8, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert (min_PP.parse_args().layers, min_PP.parse_args().nproc) == (layers, gpus or 2)


@pytest.mark.slow
def test_under_torchrun():
    options = ("--schedule", "ZBVZeroBubble", "--width", 32, "--steps", 20, "--log-every", 10, "--clip", 1)
    status, stdout, stderr = torchrun(2, "min_PP.py", *options, timeout=110)
    assert status == 0, stderr
    first, held, *_ = stdout.splitlines()
    assert first == "Training on 2 x cpu: ZBVZeroBubble"
    assert re.fullmatch(r"parameters held: [\d,]+ of [\d,]+ \(0\.[56]\d\d\)", held)
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [10, 20]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_learns_with_the_defaults():
    transformer.assert_learns("min_PP.py", "--nproc", 2)
