"""Forked processes behave like new ones."""

import signal
import subprocess
import sys

import fork_server
import pytest
from training_zoo import environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere every process is started")

PROGRAMS = {
    "streams, arguments, directory, environment": (
        "import os, sys; print(sys.argv, sys.stdin.read(), os.getcwd(), os.environ['COLUMNS'], __name__); "
        "print('ü', file=sys.stderr)"
    ),
    "exit code": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('no')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "exception": "1 / 0",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "at exit": "import atexit, threading; atexit.register(print, 'last'); threading.Thread(target=print).start()",
    "threads": "import torch; print(torch.get_num_threads())",
    "descriptors": "import os; print(len(os.listdir('/proc/self/fd')))",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_does_what_a_process_does(name, tmp_path):
    command = [sys.executable, "-c", PROGRAMS[name], "a b", "ü"]
    options = {"cwd": tmp_path, "env": environment(COLUMNS="77"), "encoding": "utf-8", "input": "text"}
    forked, real = (fork_server.run(command, **options, real=real) for real in (False, True))
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


def test_no_two_forks_draw_the_same_numbers(tmp_path):
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    options = {"cwd": tmp_path, "env": environment(), "encoding": "utf-8"}
    one, two = (fork_server.run([sys.executable, "-c", code], **options).stdout.split() for _ in range(2))
    assert len({*one, *two}) == 6


def test_signals_reach_a_fork_and_it_can_be_waited_for(tmp_path):
    waiting = "import time; print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", waiting]
    with fork_server.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert isinstance(process, fork_server.Forked)
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_other_library_settings_start_a_new_process():
    command = [sys.executable, "-m", "linformer_kit.cli"]
    assert fork_server.server_for(command, environment(RANK="1")) is not None
    assert fork_server.server_for(command, environment(OMP_NUM_THREADS="2")) is None
    assert fork_server.server_for([sys.executable, "-X", "utf8", "-c", ""], environment()) is None
