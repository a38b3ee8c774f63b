"""Each script that trains the GPT equals one process, holds its share, resumes, and sends what its docstring says.

Most tests have one row for each script and number of processes: `test_equal_to_one_process[min_FSDP-4]`. `ROWS` says
what is trained there, and `RUNS` what is stopped and resumed. A script's own tests have what it alone promises.
"""

import importlib
import itertools
import math
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import transformer
from conftest import SLOW_GUARD, Watch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt

CLIP = {"clip": 0.5}
ODD = transformer.ODD
TWO_BLOCKS = {"layers": 2}
NOT_SAVED = {"checkpoint_dir": None, "save_every": 100}
OPTIONS = {  # that a script has beside those of all, where a row names no others
    "min_FSDP": {**TWO_BLOCKS, **NOT_SAVED},
    "min_FSDP_TP": {**TWO_BLOCKS, **NOT_SAVED, "replicate": 1, "shard": 1, "tensor": 1, "recompute": False},
    "min_TP": TWO_BLOCKS,
    "min_CP": {**TWO_BLOCKS, "attention": "ulysses"},
    "min_PP": {"schedule": "1F1B", "micro_batches": 4},
}

# ---- what is trained ------------------------------------------------------------------------------------------------

QUICK, SLOW, GUARD = (), pytest.mark.slow, SLOW_GUARD  # when a row is tested


@dataclass
class Row:
    """Runs of a script's main_worker, one after the other in one job: (optimizer, options) of each."""

    script: str
    nprocs: int
    when: object
    runs: list
    about: str = ""

    def __str__(self):
        return "-".join(filter(None, [self.script, str(self.nprocs), self.about]))


def mesh(replicate, shard, tensor, **options):
    return {"replicate": replicate, "shard": shard, "tensor": tensor, **options}


def schedule(name, micro_batches=4, **options):
    return {"schedule": name, "micro_batches": micro_batches, **options}


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
if torch.__version__ < "2.12":  # there min_PP.py refuses two stages in a row on one process
    SCHEDULES = SCHEDULES[:4]
IN_ONE_PROCESS = [name for name in SCHEDULES if torch.__version__ >= "2.12" or name in ("GPipe", "1F1B")]

ZERO = [("AdamW", {**ODD, **CLIP}), ("SGD", {**ODD, **CLIP})]
FSDP = [("AdamW", {}), ("SGD", CLIP)]
UNEVEN = {"global_batch_size": 6, **CLIP}  # for 3 processes, of which nothing is a multiple
TP = [("AdamW", {}), ("SGD", {}), ("SGD", {"clip": 1.5})]  # the last one clips about half of the steps
THREE = {"heads": 3, "width": 36, "length": 33}  # 256 bytes are not a multiple of 3
CP = [("AdamW", {}), ("SGD", {"clip": 1.5})]
CP += [(optimizer, {**options, "attention": "all-gather"}) for optimizer, options in CP]

ROWS = [
    Row("min_ZeRO", 1, SLOW, ZERO),
    Row("min_ZeRO", 2, SLOW, ZERO),
    Row("min_ZeRO", 4, QUICK, ZERO),
    Row("min_FSDP", 1, SLOW, FSDP),
    Row("min_FSDP", 2, QUICK, FSDP),
    Row("min_FSDP", 3, SLOW, [("SGD", UNEVEN)]),
    Row("min_FSDP", 4, GUARD, FSDP),
    Row("min_TP", 1, SLOW, TP),
    Row("min_TP", 2, QUICK, TP),
    Row("min_TP", 3, SLOW, [(optimizer, {**THREE, **options}) for optimizer, options in TP]),
    Row("min_TP", 4, SLOW, TP),
    Row("min_FSDP_TP", 1, SLOW, [("SGD", mesh(1, 1, 1, **CLIP))]),
    Row(
        "min_FSDP_TP",
        2,
        QUICK,
        [
            ("SGD", mesh(2, 1, 1, layers=1, **CLIP)),
            ("SGD", mesh(1, 2, 1, layers=1, **CLIP)),
            ("SGD", mesh(1, 1, 2, layers=1, **CLIP)),
        ],
    ),
    Row(
        "min_FSDP_TP",
        4,
        GUARD,
        [
            ("AdamW", mesh(2, 2, 1)),
            ("SGD", mesh(2, 2, 1, **CLIP)),
            ("AdamW", mesh(1, 2, 2, **CLIP)),
            ("SGD", mesh(1, 2, 2)),
            ("SGD", mesh(1, 2, 2, **CLIP, recompute=True)),
        ],
    ),
    Row("min_FSDP_TP", 6, SLOW, [("SGD", mesh(1, 3, 2, **UNEVEN))]),
    Row(
        "min_FSDP_TP",
        8,
        SLOW,
        [(optimizer, mesh(2, 2, 2, **CLIP, recompute=True)) for optimizer in ("AdamW", "SGD")],
    ),
    Row("min_CP", 1, SLOW, CP[:2]),  # one process has the attention of the model
    Row("min_CP", 2, QUICK, CP),
    Row("min_CP", 4, SLOW, CP),
    Row("min_PP", 1, SLOW, [("AdamW", {}), *[("SGD", schedule(name, **CLIP)) for name in IN_ONE_PROCESS]]),
    Row("min_PP", 2, QUICK, [("SGD", schedule("GPipe", 1))]),  # not clipped, which would hide a wrong scale
    Row(
        "min_PP",
        2,
        GUARD,
        [
            ("AdamW", schedule(SCHEDULES[-1])),
            *[("SGD", schedule(name, **CLIP)) for name in SCHEDULES],
            ("SGD", schedule("1F1B", 2, layers=5)),  # stages of two and three blocks
            ("SGD", schedule("GPipe", 8, **CLIP)),
        ],
        "all-schedules",
    ),
    Row(
        "min_PP",
        3,
        SLOW,
        [("SGD", schedule(name, 6, layers=6, global_batch_size=12, **CLIP)) for name in SCHEDULES],
    ),
    Row(
        "min_PP",
        4,
        SLOW,
        [
            ("AdamW", {}),
            ("SGD", CLIP),
            ("SGD", schedule("GPipe", 2)),  # fewer than stages
            *[("SGD", schedule(name, 8, layers=8, **CLIP)) for name in SCHEDULES[2:]],
        ],
    ),
]


def arguments(script, nprocs=1, **options):
    """As the script's parse_args would give them."""
    return transformer.arguments(nprocs, **{**OPTIONS.get(script, {}), **options})


def reference(script, optimizer, options):
    """Every step's loss and the trained parameters of one process of plain PyTorch."""
    known = vars(transformer.arguments())
    chosen = {**OPTIONS.get(script, {}), **options}
    return transformer.reference(optimizer, **{name: chosen[name] for name in chosen if name in known})


def own_parameters(script, model):
    """Those that this process trains, by name. A DTensor is made whole."""
    if script == "min_PP":
        model = model.model
    return transformer.full_parameters(model)


def of_all_processes(own):
    """All parameters by name. If several processes have one, they must have the same one in every bit."""
    together = {}
    for theirs in dist.gather_objects(own):
        for name, value in theirs.items():
            assert torch.equal(together.setdefault(name, value), value), f"{name} differs from process to process"
    return together


def elements(tensors):
    """How many numbers of these tensors this process holds."""
    return sum(transformer.local(tensor).numel() for tensor in tensors if tensor is not None)


def train(script, optimizer, options):
    """What a script's main_worker trains, holds and prints in this process."""
    args = arguments(script, dist.get_world_size(), **options)
    run = transformer.run_main_worker(importlib.import_module(script), args, optimizer)
    own = own_parameters(script, run.model)
    model = getattr(run.model, "model", run.model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the outermost one stays gathered after an evaluation
    params = list(model.parameters())
    for param in params:
        if isinstance(param, DTensor) and "replicate" in (param.device_mesh.mesh_dim_names or ()):
            assert args.replicate > 1, "gradients of one replica are reduced over a group of one"
    states = getattr(run.optimizer, "optim", run.optimizer).state.values()
    moments = [value for state in states for value in state.values() if value is not None and value.dim()]
    return {
        "losses": run.losses,
        "parameters": of_all_processes(own),
        "held out": run.held_out.item(),
        "held": elements(params),
        "gradients": elements(param.grad for param in params),
        "state": elements(moments),
        "stdout": run.stdout,
    }


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """A row, and for each of its runs what `train` gives on each process."""
    row = request.param
    runs = [(row.script, *run) for run in row.runs]
    ranks = transformer.train_on(row.nprocs, train, runs, tmp_path_factory.mktemp("job"))
    return row, list(zip(row.runs, zip(*ranks, strict=True), strict=True))


each_row = pytest.mark.parametrize(
    "job", [pytest.param(row, id=str(row), marks=row.when) for row in ROWS], indirect=True
)


@pytest.mark.timeout(300)  # seconds alone; minutes among many other processes
@each_row
def test_equal_to_one_process(job):
    row, runs = job
    for (optimizer, options), ranks in runs:
        print(row, optimizer, options)
        expected = reference(row.script, optimizer, options)
        for result in ranks:
            transformer.assert_equal(result["losses"], ranks[0]["parameters"], expected)
        expected = transformer.held_out_loss(expected[1], arguments(row.script, **options))
        for result in ranks:
            assert abs(result["held out"] - expected) <= 1e-9
        last = transformer.progress_lines(ranks[0]["stdout"])[-1]
        assert last["held_out"] == pytest.approx(expected, abs=6e-5)
        assert not any(result["stdout"] for result in ranks[1:]), "only the primary rank prints"


def share(script, args):
    """The part of the parameters that a process may hold, and how many processes hold each.

    The number is None if it is not the same for all.
    """
    n = args.nproc
    if script == "min_FSDP":
        return {3: 1.02}.get(n, 1.01) / n, 1
    if script == "min_TP":
        return {1: 1, 2: 0.52, 3: 0.36, 4: 0.27}[n], None  # norms and a bias of each row-wise layer are not split
    if script == "min_FSDP_TP":
        return 1.08 / args.shard / args.tensor, args.replicate if args.tensor == 1 else None
    if script == "min_PP":
        return (1.5 if n > 1 else 1) / n, 1  # narrow embeddings are a large part here
    return 1, n


@each_row
def test_each_process_holds_its_share_and_says_so(job):
    row, runs = job
    for (optimizer, options), ranks in runs:
        print(row, optimizer, options)
        total = sum(value.numel() for value in ranks[0]["parameters"].values())
        held = [result["held"] for result in ranks]
        largest, copies = share(row.script, arguments(row.script, row.nprocs, **options))
        assert max(held) <= largest * total and sum(held) >= total
        assert copies is None or sum(held) == copies * total
        line = f"parameters held: {max(held):,} of {total:,} ({max(held) / total:.3f})\n"
        assert line in ranks[0]["stdout"]
        moments = {"AdamW": 2, "SGD": 1}[optimizer]
        for result in ranks:
            assert result["gradients"] == result["held"]
            stepped = math.ceil(total / row.nprocs) if row.script == "min_ZeRO" else result["held"]
            assert result["state"] == moments * stepped
        if row.script == "min_ZeRO":
            state = 8 * moments * stepped  # bytes in float64, beside those of AdamW in float32
            line = f"optimizer state held: {state:,} of {8 * total:,} bytes ({state / 8 / total:.3f})\n"
            assert total % 2 and ranks[0]["stdout"].endswith(line)


# ---- stopped and resumed --------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run that is stopped and resumed: (number of processes, options, the step at which it stops) of each part."""

    script: str
    when: object
    parts: list
    options: dict = field(default_factory=dict)


RUNS = [
    Run("min_FSDP", GUARD, [(1, {}, 1), (4, {}, 2), (4, {}, 3), (2, {}, 5), (1, {}, 6)]),
    Run(
        "min_FSDP_TP",
        GUARD,
        [(1, {}, 1), (4, mesh(1, 2, 2), 2), (4, mesh(2, 2, 1), 3), (1, {}, 6)],
    ),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.script, marks=run.when) for run in RUNS])
def test_stopped_and_resumed_on_the_same_and_on_another_mesh_equals_one_run(run, tmp_path):
    more = {**CLIP, **run.options, "checkpoint_dir": str(tmp_path / "runs")}
    results = []
    for nprocs, parts in itertools.groupby(run.parts, lambda part: part[0]):
        runs = [(run.script, "AdamW", {**more, **options, "steps": stop}) for _, options, stop in parts]
        results += transformer.train_on(nprocs, train, runs, tmp_path)[0]
    losses = torch.cat([result["losses"] for result in results])
    stops = [stop for *_, stop in run.parts]
    expected = reference(run.script, "AdamW", {**CLIP, **run.options, "steps": stops[-1]})
    transformer.assert_equal(losses, results[-1]["parameters"], expected)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"step-{stop}" for stop in stops}


@pytest.mark.parametrize("script", [run.script for run in RUNS])
def test_saves_every_so_many_steps_and_at_the_end(script, tmp_path):
    args = arguments(script, steps=5, save_every=2, checkpoint_dir=str(tmp_path))
    assert transformer.saves_of(importlib.import_module(script), args) == [2, 4, 5]


# ---- no step waits for the device -----------------------------------------------------------------------------------

NEVER_WAIT = [
    ("min_ZeRO", {}),
    ("min_FSDP", {}),
    ("min_TP", {}),
    ("min_FSDP_TP", mesh(1, 2, 1)),
    ("min_FSDP_TP", mesh(1, 1, 2)),
    ("min_CP", {}),
]
FORWARD = gpt.Block.forward


def host_reads(script, options):
    """How often the host reads a value in two steps, as a print or an if would."""
    module = importlib.import_module(script)
    args = arguments(script, dist.get_world_size(), **CLIP, **options, steps=2)
    training = module.train

    def watched_train(*given):
        # The tests' own forward reads gradients.
        with mock.patch.object(gpt, "Progress"), mock.patch.object(gpt.Block, "forward", FORWARD), watch:
            return training(*given)

    watch = Watch()
    with mock.patch.object(module, "train", watched_train):
        transformer.run_main_worker(module, args, "AdamW")
    return watch.host_reads


@pytest.mark.parametrize("script", sorted({script for script, _ in NEVER_WAIT}))
def test_the_step_loop_never_waits_for_the_device(script, tmp_path):
    cases = [case for case in NEVER_WAIT if case[0] == script]
    assert transformer.train_on(2, host_reads, cases, tmp_path) == 2 * [len(cases) * [0]]
