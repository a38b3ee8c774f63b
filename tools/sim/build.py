"""Build the simulated accelerator into .sim/, which goes on PYTHONPATH: `make sim`, or python tools/sim/build.py.

`build()` does nothing if the folder is up to date. It needs g++, Python's headers and torch 2.14, but imports no torch.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / ".sim"
VERSION = "2.14"
FLAGS = "-std=c++20 -O1 -fPIC -fvisibility=hidden -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DTORCH_EXTENSION_NAME=_C"


def why_not():
    """Why it cannot be built here, in a line, or None."""
    version = importlib.metadata.version("torch")
    if not version.startswith(VERSION + "."):
        return f"simulated GPUs need torch {VERSION}, and this is {version}"
    if shutil.which("g++") is None:
        return "simulated GPUs need g++ (apt-get install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "simulated GPUs need the headers of Python (apt-get install python3-dev)"
    return None


def build():
    """The folder for PYTHONPATH. Raises RuntimeError with the line of `why_not`, or with what g++ says."""
    if reason := why_not():
        raise RuntimeError(reason)
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of tests may want it at the same time
        stamp, made_of = FOLDER / "made_of", _fingerprint()
        if not stamp.exists() or stamp.read_text() != made_of:
            stamp.unlink(missing_ok=True)
            _compile()
            _install()
            stamp.write_text(made_of)
    return FOLDER


def _fingerprint():
    digest = hashlib.sha256()
    for path in [*sorted(HERE.glob("*.cpp")), HERE / "runtime.h", HERE / "build.py", *sorted(HERE.glob("simgpu/*.py"))]:
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} torch {importlib.metadata.version('torch')} python {sys.version}\n"


def _compile():
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    objects = FOLDER / "objects"
    objects.mkdir(exist_ok=True)
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*FLAGS.split(), *(f"-I{folder}" for folder in headers)]
    shutil.copy(HERE / "runtime.h", objects)
    # All files include this header, and most of their time would go to the headers of torch in it.
    _run("g++", *flags, "-x", "c++-header", objects / "runtime.h", "-o", objects / "runtime.h.gch")
    sources = [shutil.copy(source, objects) for source in sorted(HERE.glob("*.cpp"))]  # where the header is compiled
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: _run("g++", *flags, "-c", source, "-o", f"{source}.o"), sources))
    libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-ltorch_python", "-ltorch", "-lc10"]
    _run("g++", "-shared", *(f"{source}.o" for source in sources), *libraries, "-o", FOLDER / "_C.so")
    shutil.rmtree(objects)


def _run(*command):
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


def _install():
    package, metadata = FOLDER / "simgpu", FOLDER / "simgpu-1.dist-info"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(HERE / "simgpu", package)
    (FOLDER / "_C.so").rename(package / "_C.so")
    metadata.mkdir(exist_ok=True)
    version = importlib.metadata.version("torch").partition("+")[0]  # simgpu's is the one of torch
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: simgpu\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nsim = simgpu:autoload\n")  # `import torch` calls it


if __name__ == "__main__":
    try:
        build()
    except RuntimeError as error:
        sys.exit(f"not built: {error}")
