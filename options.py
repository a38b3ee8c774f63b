"""Command-line options of the scripts: argparse, with errors of one line.

parser = options.ArgumentParser(__doc__)
parser.add_argument("--epochs", type=options.whole_number(1), default=5, help="passes over the data")
parser.add_argument("--lr", type=options.positive_number, default=0.01, help="learning rate")
parser.add_nproc()
args = parser.parse_args()
dist.launch(main_worker, args, nprocs=args.nproc)
"""

import argparse
import contextlib
import math
import os
import re

import distributed as dist

LARGEST = 2**31 - 1


class ArgumentParser(argparse.ArgumentParser):
    """argparse with the first line of `doc` and the defaults in its help, and errors of one line.

    Each option may be typed with underscores too: --batch_size is --batch-size. A value `~/...` is in the home folder.
    """

    def __init__(self, doc):
        super().__init__(description=(doc or "").partition("\n")[0], formatter_class=HelpFormatter)

    def add_nproc(self):
        """Add --nproc. Under a launcher `args.nproc` is the number of processes that the launcher started."""
        gpus = dist.device_count()
        default = dist.get_world_size() if dist.is_launched() else max(1, gpus)
        help_text = "processes to start on this machine (default: one per visible GPU, or 1)"
        self.add_argument("--nproc", type=whole_number(1, gpus or LARGEST), default=default, help=help_text)

    def add_checkpoints(self, save_every=100):
        """Add --checkpoint-dir, --save-every and --keep, which `checkpoint_sharded.Saver` reads."""
        self.add_argument("--checkpoint-dir", help="save in this folder, and resume from its newest checkpoint")
        self.add_argument("--save-every", type=whole_number(1), default=save_every, help="steps between checkpoints")
        self.add_argument("--keep", type=whole_number(1), help="checkpoints to keep (default: all)")

    def _parse_optional(self, word):  # argparse asks it what each word of the command line is
        return super()._parse_optional(re.sub("^--[^=]+", lambda option: option[0].replace("_", "-"), word))

    def _get_value(self, action, text):  # argparse converts each value with it; no shell expands --output=~/model.pt
        return super()._get_value(action, os.path.expanduser(text) if text.startswith("~/") else text)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None, and except where the help text already states the default."""

    def _get_help_string(self, action):
        if action.default is None or "default" in action.help:
            return action.help
        return super()._get_help_string(action)


def whole_number(minimum, maximum=LARGEST):
    """An argparse `type`: a whole number from `minimum` to `maximum`."""
    bounds = f"of at least {minimum}" if maximum == LARGEST else f"from {minimum} to {maximum}"

    def parse(text):
        if text.isdecimal() and minimum <= int(text) <= maximum:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")

    return parse


def number(minimum, below=math.inf):
    """An argparse `type`: a number that is at least `minimum` and below `below`."""
    bounds = f"of at least {minimum}" if below == math.inf else f"of at least {minimum} and below {below}"

    def parse(text):
        with contextlib.suppress(ValueError):  # of float
            if minimum <= float(text) < below:
                return float(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")

    return parse


def positive_number(text):
    """An argparse `type`: a finite number above 0."""
    with contextlib.suppress(ValueError):  # of float
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
