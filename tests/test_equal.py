"""Each script that trains the GPT equals one process, holds its share, resumes, and sends what its docstring says.

Most tests have one row for each script and number of processes: `test_equal_to_one_process[min_FSDP-4]`. `ROWS` says
what is trained there, and `RUNS` what is stopped and resumed. A script's own tests have what it alone promises.
"""

import contextlib
import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import references
import torch
import transformer
from conftest import ROOT, SLOW_GUARD, Watch, finish, on_processes, run, start
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt

CLIP = {"clip": 0.5}
ODD = transformer.ODD
TWO_BLOCKS = {"layers": 2}
NOT_SAVED = {"checkpoint_dir": None, "save_every": 100}
EXPERTS = {**TWO_BLOCKS, "steps": 8, "experts": 8, "top": 2, "balance": "loss", "balance_weight": 0.1, "idle": ()}
OPTIONS = {  # that differ from transformer.arguments, where a row says nothing else
    "min_ZeRO": {**ODD, **CLIP},
    "min_FSDP": {**TWO_BLOCKS, **NOT_SAVED},
    "min_Muon": {**ODD, **CLIP, **NOT_SAVED, "muon_lr": 0.02},
    "min_FSDP_TP": {**TWO_BLOCKS, **NOT_SAVED, "replicate": 1, "shard": 1, "tensor": 1, "recompute": False},
    "min_TP": TWO_BLOCKS,
    "min_CP": {**TWO_BLOCKS, "attention": "ulysses"},
    "min_CP_ring": TWO_BLOCKS,
    "min_CP_packed": TWO_BLOCKS,
    "min_PP": {"schedule": "1F1B", "micro_batches": 4},
    "min_PP_FSDP_TP": {"schedule": "1F1B", "micro_batches": 4, **NOT_SAVED, "stages": 1, "shard": 1, "tensor": 1},
    "min_EP": EXPERTS,
    "min_EP_FSDP": {**EXPERTS, "global_batch_size": 12, "expert_parallel": 1},
    "min_DDP_scratch": {**ODD, "bucket_mb": 0.05, "accumulate": 1},
    "min_FSDP_scratch": {**ODD, "layers": 3},
    "min_DiLoCo": {"layers": 1, "steps": 14, "outer_lr": 0.7, "outer_momentum": 0.9},
    "min_Join": {"layers": 1, "steps": 10, "least": 4},
    "min_Bitwise": {**ODD, "snapshot_path": None},
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


def stages(n_stages, shard, tensor, **options):
    return {"stages": n_stages, "shard": shard, "tensor": tensor, **options}


def each_with(runs, **more):
    return [(optimizer, {**options, **more}) for optimizer, options in runs]


ADAMW_AND_SGD = [("AdamW", {}), ("SGD", CLIP)]
UNEVEN = {"global_batch_size": 6, **CLIP}  # for 3 processes, of which nothing is a multiple
TP = [("AdamW", {}), ("SGD", {}), ("SGD", {"clip": 1.5})]  # the last one clips about half of the steps
THREE = {"heads": 3, "width": 36, "length": 33}  # 256 bytes are not a multiple of 3
CP = [("AdamW", {}), ("SGD", {"clip": 1.5})]
IDLE = {"idle": (0, 6, 7)}  # of 8 experts: of 4 processes, the last has no token and the first has some
EP = [("AdamW", IDLE), ("SGD", {"top": 3}), ("SGD", {"clip": 0.3})]
BIAS = [(optimizer, {"balance": "bias", "bias_step": 0.02}) for optimizer in ("AdamW", "SGD")]
EP_FSDP = [("SGD", {**IDLE, "clip": 0.3}), ("AdamW", {**IDLE, "clip": 0.3}), ("SGD", {"top": 3})]
DILOCO = [("AdamW", {"sync_every": 4}), ("SGD", {"sync_every": 6})]  # with a short last round
EVERY_STEP = {"sync_every": 1, "outer_momentum": 0.0, "outer_lr": 1.0}
JOIN = [*each_with(ADAMW_AND_SGD, method="join"), *each_with(ADAMW_AND_SGD, method="weights")]
NOTHING_LEFT = [("SGD", {"least": 0, "method": method}) for method in ("join", "weights")]
NARROW = {"width": 9, "heads": 3, "lr": 0.05, "muon_lr": 0.1}  # of 9 rows the last of 4 processes has none
MUON = [("AdamW", {}), ("SGD", {}), ("AdamW", NARROW)]
INTERLEAVED = {"schedule": "Interleaved1F1B"}
TIED = {"tie": True, **CLIP}
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
IN_ONE_PROCESS = list(SCHEDULES)
if torch.__version__ < "2.12":  # there min_PP.py refuses two stages in a row on one process
    SCHEDULES = SCHEDULES[:4]
    IN_ONE_PROCESS = SCHEDULES[:2]

MESHES_OF_2 = [("SGD", mesh(*each, layers=1, **CLIP)) for each in ((2, 1, 1), (1, 2, 1), (1, 1, 2))]
MESHES_OF_4 = [
    ("AdamW", mesh(2, 2, 1)),
    ("SGD", mesh(2, 2, 1, **CLIP)),
    ("AdamW", mesh(1, 2, 2, **CLIP)),
    ("SGD", mesh(1, 2, 2)),
    ("SGD", mesh(1, 2, 2, **CLIP, recompute=True)),
]
ALL_SCHEDULES = [
    ("AdamW", schedule(SCHEDULES[-1])),
    *[("SGD", schedule(name, **CLIP)) for name in SCHEDULES],
    ("SGD", schedule("1F1B", 2, layers=5)),  # stages of two and three blocks
    ("SGD", schedule("GPipe", 8, **CLIP)),
]
STAGES_OF_4 = [("SGD", stages(2, 2, 1, **CLIP, **TWO_BLOCKS)), ("AdamW", stages(2, 2, 1, **INTERLEAVED))]
ALL_STAGES_OF_4 = [
    ("SGD", stages(2, 2, 1)),  # not clipped, which would hide a wrong scale
    ("SGD", stages(2, 2, 1, **INTERLEAVED, **CLIP)),
    ("AdamW", stages(2, 2, 1, **CLIP)),
    ("SGD", stages(2, 1, 2, **CLIP)),
    ("AdamW", stages(2, 1, 2, **INTERLEAVED, **CLIP)),
    ("SGD", stages(1, 2, 2, **CLIP)),
    ("AdamW", stages(1, 2, 2, **CLIP)),
    ("SGD", stages(4, 1, 1, **CLIP, layers=5)),  # three stages of one block and one of two
]
STAGES_OF_8 = [
    ("SGD", stages(2, 2, 2, **CLIP)),
    ("AdamW", stages(2, 2, 2, **CLIP)),
    ("SGD", stages(2, 2, 2, **INTERLEAVED)),
    ("SGD", stages(2, 2, 2, **CLIP, micro_batches=2)),  # two sequences in each
]
BUCKETS = [
    ("AdamW", {}),
    ("SGD", {**CLIP, "bucket_mb": 0}),  # each parameter by itself
    ("AdamW", {"accumulate": 2}),
    ("SGD", {"accumulate": 2, "bucket_mb": 100}),  # all at once
]
ALL_ROUNDS = [
    *DILOCO,
    ("AdamW", {**CLIP, "sync_every": 5, "outer_momentum": 0.0, "outer_lr": 0.8}),
    ("SGD", EVERY_STEP),
    ("AdamW", EVERY_STEP),
]


def of_schedules(names, micro_batches, layers, **options):
    return [("SGD", schedule(name, micro_batches, layers=layers, **options, **CLIP)) for name in names]


def tied(*runs):
    return [(optimizer, {**TIED, **options}) for optimizer, options in runs]


def rows(script, whens, runs, about=""):
    """The same runs on each of these numbers of processes; `whens` says for each number when it is tested."""
    return [Row(script, nprocs, when, runs, about) for nprocs, when in whens.items()]


ROWS = [
    *rows("min_ZeRO", {1: SLOW, 2: SLOW, 4: QUICK}, [("AdamW", {}), ("SGD", {})]),
    *rows("min_FSDP", {1: SLOW, 2: QUICK, 4: GUARD}, ADAMW_AND_SGD),
    *rows("min_FSDP", {3: SLOW}, [("SGD", UNEVEN)]),
    *rows("min_TP", {1: SLOW, 2: QUICK, 4: SLOW}, TP),
    *rows("min_TP", {3: SLOW}, each_with(TP, **THREE)),
    *rows("min_FSDP_TP", {1: SLOW}, [("SGD", CLIP)]),
    *rows("min_FSDP_TP", {2: QUICK}, MESHES_OF_2),
    *rows("min_FSDP_TP", {4: GUARD}, MESHES_OF_4),
    *rows("min_FSDP_TP", {6: SLOW}, [("SGD", mesh(1, 3, 2, **UNEVEN))]),
    *rows("min_FSDP_TP", {8: SLOW}, each_with(ADAMW_AND_SGD, **mesh(2, 2, 2, **CLIP, recompute=True))),
    *rows("min_CP", {1: SLOW}, CP),  # one process has the attention of the model
    *rows("min_CP", {2: QUICK, 4: SLOW}, [*CP, *each_with(CP, attention="all-gather")]),
    *rows("min_PP", {1: SLOW}, [("AdamW", {}), *of_schedules(IN_ONE_PROCESS, 4, 4)]),
    *rows("min_PP", {1: SLOW}, tied(("SGD", {})), "tied"),
    *rows("min_PP", {2: QUICK}, tied(("AdamW", {}), ("SGD", {}), ("SGD", schedule(SCHEDULES[-1]))), "tied"),
    *rows("min_PP", {3: SLOW}, tied(("SGD", schedule("1F1B", 6, layers=6, global_batch_size=12))), "tied"),
    *rows("min_PP", {2: QUICK}, [("SGD", schedule("GPipe", 2))]),  # not clipped, which would hide a wrong scale
    *rows("min_PP", {2: GUARD}, ALL_SCHEDULES, "all-schedules"),
    *rows("min_PP", {3: SLOW}, of_schedules(SCHEDULES, 6, 6, global_batch_size=12)),
    # The third run has fewer micro-batches than stages.
    *rows("min_PP", {4: SLOW}, [*ADAMW_AND_SGD, ("SGD", schedule("GPipe", 2)), *of_schedules(SCHEDULES[2:], 8, 8)]),
    *rows(
        "min_PP_FSDP_TP",
        {1: SLOW},
        of_schedules([name for name in ("1F1B", "Interleaved1F1B") if name in IN_ONE_PROCESS], 4, 4),
    ),
    *rows("min_PP_FSDP_TP", {4: GUARD}, STAGES_OF_4),
    *rows("min_PP_FSDP_TP", {4: SLOW}, ALL_STAGES_OF_4, "all-meshes"),
    *rows("min_PP_FSDP_TP", {6: SLOW}, [("SGD", stages(2, 3, 1, **CLIP, global_batch_size=12))]),
    *rows("min_PP_FSDP_TP", {8: SLOW}, STAGES_OF_8),
    # A length is 2·N pieces. There are fewer heads than processes, or as many as do not divide.
    *rows("min_CP_ring", {1: SLOW}, CP),
    *rows("min_CP_ring", {2: QUICK}, each_with(CP, heads=1)),
    *rows("min_CP_ring", {3: SLOW}, each_with(CP, length=36)),
    *rows("min_CP_ring", {4: SLOW}, each_with(CP, heads=2)),
    *rows("min_CP_packed", {1: SLOW}, CP),
    *rows("min_CP_packed", {2: QUICK}, each_with(CP, heads=1)),
    *rows("min_CP_packed", {3: SLOW}, each_with(CP, length=36)),
    *rows("min_CP_packed", {4: SLOW}, each_with(CP, heads=2)),
    *rows("min_EP", {1: SLOW}, [EP[0], BIAS[0]]),
    *rows("min_EP", {2: GUARD}, EP),
    *rows("min_EP", {2: QUICK}, BIAS, "bias"),
    *rows("min_EP", {4: SLOW}, [*EP, *BIAS]),
    *rows("min_EP_FSDP", {1: QUICK}, EP_FSDP[:1]),
    *rows("min_EP_FSDP", {2: GUARD}, [*EP_FSDP[:2], *each_with([*EP_FSDP[:2], *BIAS], expert_parallel=2)]),
    *rows("min_EP_FSDP", {3: SLOW}, EP_FSDP),
    *rows("min_EP_FSDP", {4: SLOW}, [run for n in (1, 2, 4) for run in each_with(EP_FSDP, expert_parallel=n)]),
    *rows("min_DDP_scratch", {2: QUICK}, BUCKETS),
    *rows("min_DDP_scratch", {3: SLOW}, BUCKETS[:1]),
    *rows("min_DDP_scratch", {4: SLOW}, BUCKETS[-1:]),
    *rows("min_FSDP_scratch", {1: SLOW, 2: GUARD, 3: SLOW, 4: SLOW}, ADAMW_AND_SGD),
    *rows("min_DiLoCo", {2: QUICK}, ALL_ROUNDS),
    *rows("min_DiLoCo", {4: SLOW}, DILOCO),
    *rows("min_Join", {1: SLOW}, JOIN),
    *rows("min_Join", {2: QUICK}, [*JOIN, *NOTHING_LEFT]),
    *rows("min_Join", {3: SLOW}, each_with(JOIN, global_batch_size=9)),
    *rows("min_Bitwise", {2: QUICK, 4: GUARD}, ADAMW_AND_SGD),
    *rows("min_Muon", {1: SLOW, 2: GUARD, 3: SLOW, 4: SLOW}, MUON),
]


def arguments(script, nprocs=1, **options):
    """As the script's parse_args would give them."""
    return transformer.arguments(nprocs, **{**OPTIONS.get(script, {}), **options})


# ---- one process ----------------------------------------------------------------------------------------------------


def reference(script, optimizer, args):
    """Every step's loss and the trained parameters of one process of plain PyTorch."""
    others = {
        "min_EP": references.experts,
        "min_EP_FSDP": references.experts,
        "min_DiLoCo": references.copies,
        "min_Join": references.what_is_left,
        "min_Muon": references.muon,
    }
    if script in others:
        return others[script](optimizer, args)
    if script == "min_CP_packed":
        return references.documents(optimizer, args)
    plain = vars(transformer.arguments()).keys() - {"nproc", "log_every"}
    return transformer.reference(optimizer, **{name: value for name, value in vars(args).items() if name in plain})


def held_out_loss(script, parameters, args):
    model, loss_of = transformer.make_model(args), transformer.plain_loss
    if "experts" in args:
        model = references.dense_model(args)
    if script == "min_CP_packed":
        loss_of = references.loss_of_documents
    if args.tie:
        parameters = {**parameters, "head.weight": parameters["token.weight"]}
    return transformer.held_out_loss(model, parameters, args, loss_of)


# ---- a script's own training ----------------------------------------------------------------------------------------


def parts_of(script, model):
    """The parameters of this process by name, each whole, and as it holds them."""
    if script == "min_FSDP_scratch":
        for unit in model.units:
            unit.wait()
        own = transformer.full_parameters(model.model)
        for unit in model.units:
            unit.free()
        return own, list(model.pieces())
    model = getattr(model, "model", model)  # of a pipeline
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the outermost one stays gathered after an evaluation
    return transformer.full_parameters(model), list(model.parameters())


def gather_and_check_alike(own):
    """All parameters by name. If several processes have one, they must have the same one in every bit."""
    together = {}
    for theirs in dist.gather_objects(own):
        for name, value in theirs.items():
            assert torch.equal(together.setdefault(name, value), value), f"{name} differs from process to process"
    return together


def elements(tensors):
    """How many numbers of these tensors this process holds."""
    return sum(transformer.local(tensor).numel() for tensor in tensors if tensor is not None)


def states(optimizer):
    """The state of each parameter, of any script's optimizer or optimizers."""
    if isinstance(optimizer, tuple):
        return [state for each in optimizer for state in states(each)]
    return list(getattr(optimizer, "optim", optimizer).state.values())


def n_shares(script, args):
    """In how many shares a script divides the global batch."""
    if script in ("min_CP", "min_CP_ring", "min_CP_packed", "min_PP", "min_TP"):
        return 1
    if script == "min_FSDP_TP":
        return args.replicate * args.shard
    if script == "min_PP_FSDP_TP":
        return args.shard
    return args.nproc


def train(script, optimizer, options):
    """What a script's main_worker trains, holds and prints in this process."""
    module = importlib.import_module(script)
    args = arguments(script, dist.get_world_size(), **options)
    with references.leave_idle(args.idle) if "experts" in args else contextlib.nullcontext():
        result = transformer.run_main_worker(module, args, optimizer)
    own, params = parts_of(script, result.model)
    if args.tie and "head.weight" in own:  # another process may have the embedding
        assert torch.equal(own.setdefault("token.weight", own["head.weight"]), own.pop("head.weight"))
    for param in params:
        if isinstance(param, DTensor) and "replicate" in (param.device_mesh.mesh_dim_names or ()):
            assert args.replicate > 1, "gradients of one replica are reduced over a group of one"
    assert result.data.share[1] == n_shares(script, args), "its share of the batch"
    moments = [value for state in states(result.optimizer) for value in state.values() if value is not None]
    return {
        "losses": result.losses,
        "parameters": gather_and_check_alike(own),
        "held": elements(params),
        "gradients": elements(param.grad for param in params),
        "state": elements(value for value in moments if value.dim()),
        "stdout": result.stdout,
    }


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """A row, and for each of its runs what `train` gives on each process."""
    row = request.param
    runs = [(row.script, *each) for each in row.runs]
    ranks = transformer.train_on(row.nprocs, train, runs, tmp_path_factory.mktemp("job"))
    return row, list(zip(row.runs, zip(*ranks, strict=True), strict=True))


each_row = pytest.mark.parametrize(
    "job", [pytest.param(row, id=str(row), marks=row.when) for row in ROWS], indirect=True
)


@each_row
def test_equal_to_one_process(job):
    row, runs = job
    for (optimizer, options), ranks in runs:
        print(row, optimizer, options)
        args = arguments(row.script, row.nprocs, **options)
        expected = reference(row.script, optimizer, args)
        parameters = ranks[0]["parameters"]
        for result in ranks:
            transformer.assert_equal(result["losses"], parameters, expected)
        # Adam enlarges rounding, which depends on the CPU, and most that of the keys' biases, whose gradients are 0.
        # Under Adam a mistake is 1e-6 or more.
        bound = 1e-10 if optimizer == "AdamW" else 1e-12
        without = [transformer.without_keys_biases(each, args.heads) for each in (parameters, expected[1])]
        transformer.assert_equal(ranks[0]["losses"], without[0], (expected[0], without[1]), bound)
        *_, last = lines = transformer.progress_lines(ranks[0]["stdout"])
        assert last["held_out"] == pytest.approx(held_out_loss(row.script, parameters, args), abs=6e-5)
        assert not any(result["stdout"] for result in ranks[1:]), "only the primary rank prints"
        if "experts" in args:
            check_tokens(ranks[0]["stdout"], args, len(lines))


def check_tokens(stdout, args, n_lines):
    """With each line of progress are the tokens of each block's experts: all tokens, and none of the idle ones."""
    blocks = re.findall(r"\[(.*?)]", stdout)
    assert len(blocks) == n_lines * args.layers
    for block in blocks:
        counts = [int(count) for count in block.split(", ")]
        assert sum(counts) == args.top * args.global_batch_size * args.length
        assert all(counts[number] == 0 for number in args.idle)


def share(script, args, parameters):
    """How many elements a process may hold, and how many processes hold each one (None: some more than others)."""
    n = args.nproc
    total = sum(value.numel() for value in parameters.values())
    if script in ("min_FSDP", "min_FSDP_scratch", "min_EP_FSDP"):
        return 1.03 * total / n, 1
    if script == "min_Muon":
        return 1.35 * total / n, 1  # 3 of 9 rows on one of 4 processes
    if script == "min_TP":
        return {1: 1, 2: 0.52, 3: 0.36, 4: 0.27}[n] * total, None  # norms and some biases are not split
    if script == "min_FSDP_TP":
        return 1.08 * total / args.shard / args.tensor, args.replicate if args.tensor == 1 else None
    if script == "min_PP":
        most = (1.5 if n > 1 or args.tie else 1) * total / n  # narrow embeddings are a large part here
        return most, None if args.tie else 1
    if script == "min_PP_FSDP_TP":
        return (1.7 if n > 1 else 1) * total / n, 1 if args.tensor == 1 else None
    if script == "min_EP":
        experts = sum(value.numel() for name, value in parameters.items() if ".experts." in name)
        return total - experts + experts // n, None
    return total, n


HOLD_ALL = (
    "min_DDP_scratch",
    "min_DiLoCo",
    "min_Join",
    "min_Bitwise",
    "min_ZeRO",
    "min_CP",
    "min_CP_ring",
    "min_CP_packed",
)


@each_row
def test_each_process_holds_its_share_and_says_so(job):
    row, runs = job
    for (optimizer, options), ranks in runs:
        print(row, optimizer, options)
        args = arguments(row.script, row.nprocs, **options)
        # All but the biases of experts, which no optimizer trains.
        parameters = {name: each for name, each in ranks[0]["parameters"].items() if not name.endswith(".mlp.bias")}
        total = sum(value.numel() for value in parameters.values())
        held = [result["held"] for result in ranks]
        most, copies = share(row.script, args, parameters)
        assert max(held) <= most and sum(held) >= total
        assert copies is None or sum(held) == copies * total
        if row.script not in ("min_DDP_scratch", "min_DiLoCo", "min_Join", "min_Bitwise"):
            check_gradients_and_state(row, optimizer, args, parameters, ranks)
        if row.script not in HOLD_ALL:
            line = f"parameters held: {max(held):,} of {total:,} ({max(held) / total:.3f})\n"
            assert line in ranks[0]["stdout"]


def check_gradients_and_state(row, optimizer, args, parameters, ranks):
    """They have as many elements as the parameters, and AdamW's state twice as many."""
    total = sum(value.numel() for value in parameters.values())
    moments = {"AdamW": 2, "SGD": 1}[optimizer]
    if row.script == "min_Muon":
        matrices = sum(value.numel() for name, value in parameters.items() if references.is_matrix(name))
        assert sum(result["state"] for result in ranks) == matrices + moments * (total - matrices)
    elif row.script == "min_ZeRO":
        part = math.ceil(total / row.nprocs)
        assert total % 2 and all(result["state"] == moments * part for result in ranks)
        n_bytes = 8 * moments * part  # of float64, beside those of AdamW in float32
        line = f"optimizer state held: {n_bytes:,} of {8 * total:,} bytes ({n_bytes / 8 / total:.3f})\n"
        assert ranks[0]["stdout"].endswith(line)
    else:
        assert all(result["state"] == moments * result["gradients"] for result in ranks)
    for result in ranks:
        if getattr(args, "idle", ()):  # an expert without a token has no gradient
            assert result["gradients"] <= result["held"]
        else:
            assert result["gradients"] == result["held"]


# ---- stopped and resumed --------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run that is stopped and resumed: number of processes, options and last step of each part."""

    script: str
    when: object
    parts: list
    about: str = ""

    def __str__(self):
        return "-".join(filter(None, [self.script, self.about]))


OF_ONE_PIECE = {"script": "min_FSDP_TP", "layers": 4}  # it resumes what min_PP_FSDP_TP.py has saved
MESHES = [
    (4, stages(2, 2, 1), 3),
    (4, stages(2, 1, 2, **INTERLEAVED), 4),
    (4, stages(1, 2, 2), 5),
    (4, stages(2, 2, 1), 6),
]
RUNS = [
    Run("min_FSDP", GUARD, [(1, {}, 1), (4, {}, 2), (4, {}, 3), (2, {}, 5), (1, {}, 6)]),
    Run("min_Muon", GUARD, [(1, {}, 1), (4, {}, 2), (3, {}, 4), (2, {}, 5), (1, {}, 6)]),
    Run("min_FSDP_TP", GUARD, [(1, {}, 1), (4, mesh(1, 2, 2), 2), (4, mesh(2, 2, 1), 3), (1, {}, 6)]),
    Run(
        "min_PP_FSDP_TP", GUARD, [(1, {}, 2), (4, stages(2, 2, 1, **INTERLEAVED), 3), (1, {}, 5), (1, OF_ONE_PIECE, 6)]
    ),
    Run("min_PP_FSDP_TP", SLOW, [(1, {}, 2), *MESHES, (1, {}, 8), (1, OF_ONE_PIECE, 9)], "all-meshes"),
]


@pytest.mark.parametrize("stopped", [pytest.param(each, id=str(each), marks=each.when) for each in RUNS])
def test_stopped_and_resumed_on_the_same_and_on_another_mesh_equals_one_run(stopped, tmp_path):
    more = {**CLIP, "checkpoint_dir": str(tmp_path / "runs"), "save_every": 2}
    results, stops = [], []
    for nprocs, parts in itertools.groupby(stopped.parts, lambda part: part[0]):
        runs = []
        for _, options, stop in parts:
            chosen = {"script": stopped.script, **more, **options, "steps": stop}
            runs.append((chosen.pop("script"), "AdamW", chosen))
            stops.append(stop)
        results += transformer.train_on(nprocs, train, runs, tmp_path)[0]
    expected = reference(stopped.script, "AdamW", arguments(stopped.script, **CLIP, steps=stops[-1]))
    losses = torch.cat([result["losses"] for result in results])
    transformer.assert_equal(losses, results[-1]["parameters"], expected)
    saved = {*stops, *range(2, stops[-1], 2)}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"step-{step}" for step in saved}


# ---- no step waits for the device -----------------------------------------------------------------------------------

NEVER_WAIT = [  # test_on_devices.py has these and others on simulated GPUs
    ("min_ZeRO", {}),
    ("min_FSDP", {}),
    ("min_Muon", {}),
    ("min_TP", {}),
    ("min_FSDP_TP", mesh(1, 2, 1)),
    ("min_FSDP_TP", mesh(1, 1, 2)),
    ("min_CP", {}),
    ("min_DDP_scratch", {}),
    ("min_FSDP_scratch", {}),
    ("min_Bitwise", {}),
]


def without_progress(train, *given):
    """A script's own training, without the lines of progress, which need more."""
    with mock.patch.object(gpt, "Progress"):
        return train(*given)


@on_processes(2)
@pytest.mark.parametrize(("script", "options"), NEVER_WAIT)
def test_the_step_loop_never_waits_for_the_device(script, options):
    """The host reads no value, as a print or an if would."""
    module, watch = importlib.import_module(script), Watch()
    args = arguments(script, dist.get_world_size(), **{**CLIP, **options, "steps": 2})
    train = module.train

    def watched_train(*given):
        with watch:
            return without_progress(train, *given)

    transformer.run_main_worker(module, args, "AdamW", train=watched_train)
    assert watch.host_reads == 0


# ---- bytes sent, counted where nobody else sends any ----------------------------------------------------------------

N = 2
SIZES = {"layers": 2, "width": 64, "heads": 4, "length": 128, "global_batch_size": 8, "clip": 0.0, "log_every": 100}


def numbers_of(script, **options):
    """How many numbers of the whole model are in blocks but not in experts, in experts, and in the rest."""
    args = arguments(script, N, **{**SIZES, **options})
    model = references.dense_model(args) if "experts" in args else transformer.make_model(args)
    numbers = {"blocks": 0, "experts": 0, "rest": 0}
    for name, param in model.named_parameters():
        kind = "experts" if ".experts." in name else "blocks" if name.startswith("blocks.") else "rest"
        numbers[kind] += param.numel()
    return numbers


def expected_bytes():
    """(script, options, the bytes that a process sends in each step). A docstring has the same formula: change both."""
    layers, batch, length, width = (SIZES[name] for name in ("layers", "global_batch_size", "length", "width"))
    others = (N - 1) / N  # what a process does not have
    on_gloo = 1.5  # whose reduce-scatter is an all-reduce
    numbers = numbers_of("min_FSDP")
    ddp = 2 * others * 4 * (numbers["blocks"] + numbers["rest"])
    features = others * 4 * length * width
    # Blocks are gathered twice and the rest once, and all is reduced, which takes twice as much on gloo.
    fsdp = others * 4 * (4 * numbers["blocks"] + 3 * numbers["rest"])
    matrices = layers * 12 * width**2
    experts = {"experts": N}
    with_experts = numbers_of("min_EP", **experts)
    tokens = 4 * layers * 2 * batch * features / N
    shared = others * 4 * (4 * with_experts["blocks"] + 3 * with_experts["rest"])

    pipelines = [("1F1B", 2), ("GPipe", 2), ("InterleavedZeroBubble", 6)]  # and how often activations are sent
    if torch.__version__ >= "2.12":  # min_PP.py refuses it before
        pipelines.append(("ZBVZeroBubble", 4))
    sizes = {"layers": 4, "width": 128, "global_batch_size": 16, "clip": 1.0}
    for name, passes in pipelines:
        yield "min_PP", schedule(name, **sizes), passes * 4 * 16 * 128 * 128 / N
    # The docstring has 8·L + 4. On gloo a reduce-scatter is an all-reduce, and it is 12·L + 5.
    yield "min_TP", {}, ((12 * layers + 5) * batch + 1) * features + others * 24 * batch * length
    yield "min_CP", {"attention": "ulysses"}, ddp + 2 / N * 4 * layers * batch * features
    yield "min_CP", {"attention": "all-gather"}, ddp + 4 * layers * batch * features
    yield "min_CP_ring", {}, ddp + 3 * others * 8 * layers * batch * length * width
    yield "min_FSDP", {}, fsdp
    yield "min_ZeRO", {}, on_gloo * ddp
    yield "min_DDP_scratch", {"accumulate": 2}, ddp
    yield "min_Bitwise", {}, ddp
    yield "min_Muon", {}, fsdp + 8 * (N - 1) / N**2 * matrices
    yield "min_PP_FSDP_TP", stages(2, 1, 1), 4 * batch * length * width
    yield "min_PP_FSDP_TP", stages(1, 2, 1), on_gloo * ddp
    for every in (1, 2):
        yield "min_DiLoCo", {"sync_every": every}, ddp / every
    # There are as many experts as each token visits, so that all are used evenly.
    yield "min_EP", experts, 2 * others * 4 * (with_experts["blocks"] + with_experts["rest"]) + tokens
    yield "min_EP_FSDP", {**experts, "expert_parallel": N}, shared + tokens
    yield "min_EP_FSDP", {**experts, "expert_parallel": 1}, shared + others * 4 * 4 * with_experts["experts"]


def sent_on_loopback():
    """Bytes that all processes of this network namespace have sent, headers included; all ranks must call it."""
    dist.barrier()
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))


def count_bytes(script, options):
    """The bytes that one rank sends per step of a script's main_worker: 6 steps less 2, which leaves out the set-up.

    The smaller one of two runs counts: on a busy machine TCP sends more packets.
    """
    module, totals = importlib.import_module(script), []
    args = arguments(script, N, **{**SIZES, **options})
    train = module.train

    def measured_train(*given):
        for steps in (2, 2, 6, 2, 6):  # the first one also sets up things once
            before, args.steps = sent_on_loopback(), steps
            without_progress(train, *given)
            totals.append(sent_on_loopback() - before)

    transformer.run_main_worker(module, args, "AdamW", train=measured_train)
    return (min(totals[2::2]) - min(totals[1::2])) / 4 / N


def count_worker(local_rank, world_size):
    dist.init_process_group()
    for script, options, _ in expected_bytes():
        dist.print_primary(json.dumps([script, count_bytes(script, options)]))


def count():
    """Run in a network namespace of its own."""
    dist.launch(count_worker, nprocs=N)


@pytest.fixture(scope="module")
def counted():
    """For each case of `expected_bytes`, the script and the bytes that were counted."""
    unshare = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    if sys.platform != "linux" or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces need Linux and root")
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    job = start("-c", "import test_equal; test_equal.count()", prefix=unshare, env=env)
    status, stdout, stderr = finish(job, timeout=360)
    assert status == 0, stderr
    return [json.loads(line) for line in stdout.splitlines()]


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", sorted({script for script, *_ in expected_bytes()}))
def test_bytes_sent_are_those_of_the_docstring(script, counted):
    for (name, sent), (expected_name, options, expected) in zip(counted, expected_bytes(), strict=True):
        assert name == expected_name
        if name == script:
            print(f"{name} {options}: {sent:,.0f} bytes, {sent / expected:.4f} of the formula")
            assert sent == pytest.approx(expected, rel=0.03)


# ---- the command learns ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", [script for script in OPTIONS if script != "min_FSDP_scratch"])
def test_learns_more_than_pairs_of_bytes(script):
    status, stdout, stderr = run(f"{script}.py", "--nproc", 2, timeout=560)
    assert (status, stderr) == (0, "")
    first, *_, last = transformer.progress_lines(stdout)
    assert last["held_out"] < transformer.BIGRAM < first["held_out"], stdout


REFUSED = {  # beside those of test_options.py, and the option in the line that answers
    "min_CP_ring": {"--nproc 3 --length 128": "--length"},
    "min_CP_packed": {"--nproc 3 --length 3": "--length"},
    "min_FSDP_scratch": {"--nproc 3 --global-batch-size 16": "--global-batch-size"},
    "min_Muon": {"--nproc 3 --global-batch-size 16": "--global-batch-size"},
    "min_PP_FSDP_TP": {
        "--nproc 8 --stages 3": "--nproc",
        "--nproc 4 --stages 2 --tensor 4": "--nproc",
        "--nproc 8 --stages 2 --shard 2 --tensor 1": "--nproc",
        "--nproc 4 --stages 4 --layers 3": "--layers",
        "--nproc 4 --stages 2 --layers 3 --schedule Interleaved1F1B": "--layers",
        "--nproc 4 --stages 4 --micro-batches 3": "--micro-batches",
        "--nproc 2 --schedule Interleaved1F1B --micro-batches 5": "--micro-batches",
        "--nproc 3 --tensor 3 --heads 4": "--heads",
        "--nproc 2 --tensor 2 --length 31": "--length",
        "--nproc 4 --shard 2 --micro-batches 4 --global-batch-size 12": "--global-batch-size",
    },
}


@pytest.mark.parametrize("script", REFUSED)
def test_an_option_that_does_not_fit_is_one_line(script, main_of):
    for typed, option in REFUSED[script].items():
        status, line = main_of(f"{script}.py", *typed.split())
        assert status == 2 and line.startswith(f"{script}.py: error: argument {option}: "), line
        assert line.count("\n") == 1


def test_options_that_are_not_given_suit_the_others(launched):
    """Beside those of test_options.py. The script itself would refuse what does not fit."""
    for nproc in (*range(2, 9), 16):
        for name in SCHEDULES:
            launched("min_PP.py", "--nproc", nproc, "--schedule", name)
        for option, value in (("--stages", nproc), ("--shard", nproc), ("--tensor", nproc), ("--stages", 1)):
            launched("min_PP_FSDP_TP.py", "--nproc", nproc, option, value)
    for nproc, expected in ((1, (1, 1, 1)), (3, (1, 3, 1)), (4, (2, 1, 2)), (6, (2, 3, 1)), (8, (2, 2, 2))):
        args = launched("min_PP_FSDP_TP.py", "--nproc", nproc).args[1]
        assert (args.stages, args.shard, args.tensor) == expected
        assert launched("min_EP_FSDP.py", "--nproc", nproc).args[1].expert_parallel == (1 if nproc % 2 else 2)
    for nproc in (2, 8):
        launched("min_PP_FSDP_TP.py", "--nproc", nproc, "--stages", nproc, "--schedule", "Interleaved1F1B")
