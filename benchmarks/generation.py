"""Bytes per second of CPU time that gpt_generate.generate generates, and without its KV cache.

    python -m benchmarks.generation [--rounds 3] [--small]

- "cache": gpt_generate.generate, as min_Generate.py uses it.
- "no cache": each new byte costs the forward of all bytes before it. The same random numbers draw the same bytes.

The cases alternate, and only ratios within a round mean something. Both use one thread, so CPU time is the time that
they would take on an idle machine.
"""

import functools
import time

import torch

import gpt
import gpt_generate
import options
from benchmarks import common

PROMPT = b"def "
SHAPES = [  # layers, width, rows, new bytes
    (2, 128, 16, 64),
    (2, 128, 16, 256),
    (4, 256, 8, 128),
]
SMALL = [(1, 16, 2, 8)]


@torch.no_grad()
def generate_without_cache(model, prompts, drawn):
    tokens = torch.tensor([list(prompt) for prompt in prompts])
    for numbers in drawn.T:
        chosen, _ = gpt_generate.choose(model(tokens)[:, -1], numbers)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
    return tokens


def measure(results, name, function, n_bytes):
    begin = time.process_time()
    function()
    results[name].append(n_bytes / (time.process_time() - begin))


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=options.whole_number(1), default=3, help="measurements of each case")
    parser.add_argument("--small", action="store_true", help="only one tiny model, to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)

    results, cases, ratios = {}, {}, {}
    shapes = SMALL if args.small else SHAPES
    for layers, width, rows, n_new in shapes:
        model = gpt.GPT(gpt.Config(layers, width, 4, len(PROMPT) + n_new))
        prompts = rows * [PROMPT]
        drawn = gpt_generate.uniform("benchmark", rows, n_new)
        tokens, _, _ = gpt_generate.generate(model, prompts, drawn)
        assert (tokens != generate_without_cache(model, prompts, drawn)).double().mean() < 0.01, "but for rounding"
        shape = f"{layers} layers, width {width}, {rows} rows, {n_new} new bytes"
        functions = {"cache": gpt_generate.generate, "no cache": generate_without_cache}
        for case, function in functions.items():
            name = f"{shape}: {case}"
            results[name] = []
            work = functools.partial(function, model, prompts, drawn)
            cases[name] = functools.partial(measure, results, name, work, rows * n_new)
    common.alternate(cases, args.rounds)

    for name in results:
        shape, _, case = name.partition(": ")
        if case == "cache":
            ratios[f"{shape}: cache / no cache"] = common.ratio(results[name], results[f"{shape}: no cache"], "above 1")
    common.show(ratios)
    speeds = {name: common.summary(values) for name, values in results.items()}
    common.write("generation", {"unit": "new bytes/s of CPU time", "results": speeds, "ratios": ratios})


if __name__ == "__main__":
    main()
