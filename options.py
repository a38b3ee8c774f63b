"""Command-line options of the scripts: argparse, with errors of one line.

parser = options.ArgumentParser(__doc__)
parser.add_argument("--epochs", type=options.whole_number(1), default=5, help="passes over the data")
parser.add_argument("--lr", type=options.positive_number, default=0.01, help="learning rate")
parser.add_argument("--seed", type=options.seed_number, default=0, help="random seed")
parser.add_nproc()
args = parser.parse_args()
dist.launch(main_worker, args, nprocs=args.nproc)
"""

import argparse
import math
import sys

import torch

import distributed as dist

LARGEST = 2**31 - 1


class ArgumentParser(argparse.ArgumentParser):
    """argparse with the first line of `doc` and the defaults in its help, errors of one line, and --a_b for --a-b."""

    def __init__(self, doc=None, formatter_class=None, **kwargs):
        description = (doc or "").partition("\n")[0]
        super().__init__(description=description, formatter_class=formatter_class or HelpFormatter, **kwargs)

    def add_nproc(self, help="processes to start; ignored under torchrun (default: one per visible GPU, or 1)"):
        """Add --nproc. Under a launcher `args.nproc` is the number of processes that the launcher started."""
        gpus = torch.cuda.device_count()
        if dist.is_launched():
            default = dist.get_world_size()
            nproc_type = _number_of_launched
        else:
            default = max(1, gpus)
            why = "the number of visible GPUs: CUDA_VISIBLE_DEVICES= hides them, for processes on the CPU"
            nproc_type = whole_number(1, gpus or LARGEST, why)
        self.add_argument("--nproc", type=nproc_type, default=default, help=help)

    def require_multiple(self, args, name, divisor, why, default=None):
        """Check that `args.name` is a multiple of `divisor`; `why` names the divisor in the error.

        If the option was not given (None), it becomes the smallest multiple of `divisor` that is at least `default`.
        """
        value = getattr(args, name)
        if value is None:
            value = math.ceil(default / divisor) * divisor
            setattr(args, name, value)
        if value % divisor:
            option = "--" + name.replace("_", "-")
            self.error(f"argument {option}: {value} is not a multiple of {divisor}, {why}")

    def refuse_without(self, args, needed, *names):
        """Leave with one line if an option of `names` is given without the option `needed`: it would do nothing."""
        for name in names:
            if not getattr(args, needed) and getattr(args, name) != self.get_default(name):
                option = "--" + name.replace("_", "-")
                needed_option = "--" + needed.replace("_", "-")
                self.error(f"argument {option}: it needs {needed_option}")

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        hyphenated = [self._hyphenate(arg) for arg in args]
        return super().parse_known_args(hyphenated, namespace)

    def _hyphenate(self, arg):
        """--a_b=c as --a-b=c, if the script has declared --a-b; a script may have declared --a_b itself."""
        name, equals, value = arg.partition("=")
        option = name.replace("_", "-")
        if option in self._option_string_actions:
            return option + equals + value
        return arg

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None, and except where the help text already states the default."""

    def _get_help_string(self, action):
        if action.default is None or "default" in action.help:
            return action.help
        return super()._get_help_string(action)


def path(text):
    """An argparse `type`: a path. An empty one, as from a variable that is not set, would mean not to save."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a path, or leave the option out")
    return text


def whole_number(minimum, maximum=LARGEST, why=""):
    """An argparse `type`: a whole number from `minimum` to `maximum`; `why` explains the maximum in the error."""

    def parse(text):
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is not None and minimum <= number <= maximum:
            return number
        if maximum < LARGEST or (number is not None and number > LARGEST):
            bounds = f"from {minimum} to {maximum}"
            if why and maximum < LARGEST:
                bounds += f", {why}"
        else:
            bounds = f"of at least {minimum}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")

    return parse


def _number_of_launched(text):
    """Under a launcher any --nproc is ignored: the launcher has started the processes already."""
    whole_number(1)(text)
    return dist.get_world_size()


def seed_number(text):
    """An argparse `type`: a random seed, a whole number from 0 to 2**32 - 1."""
    return whole_number(0, 2**32 - 1)(text)


def positive_number(text):
    """An argparse `type`: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if 0 < number < math.inf:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")


def number(minimum, below=math.inf):
    """An argparse `type`: a number that is at least `minimum` and below `below`."""

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if minimum <= value < below:
            return value
        bounds = f"of at least {minimum}"
        if below < math.inf:
            bounds += f" and below {below}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")

    return parse


def one_of(*names):
    """An argparse `type`: one of `names`."""

    def parse(text):
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")

    return parse
