"""Python processes that start in milliseconds, for tests of commands: a server that has imported everything forks them.

`Popen` and `run` have the interface of `subprocess`. Each `python -m MODULE …` or `python -c CODE …` becomes a fork of
one server per session: a process with its own id, directory, environment, streams, signals and exit code, but without
the 6 seconds of imports. The server has a single thread.

An ordinary process is started instead for other programs, other interpreter options, other values of variables that
libraries read on import, or with `LINFORMER_TESTS_FORK=0`. A fork differs from a new process in three ways: string
hashes are the same in all forks, modules are loaded that the command may not need, and imports cannot fail. So some
tests of every command start an ordinary process (`real=True`).
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

# slow to import, and needed by most commands
PRELOADED = (
    *("accelerate.accelerator", "accelerate.state", "datasets", "pandas", "sacrebleu", "safetensors.torch", "yaml"),
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "rich.progress", "rich.table", "typer"),
    *("torch._dynamo", "torch.distributed.run", "torch.nn.parallel", "torch.utils.data"),
    *("transformers.modeling_utils", "transformers.tokenization_utils_fast", "transformers.trainer"),
    *("linformer_kit.training.evaluate", "linformer_kit.training.predict", "linformer_kit.training.train"),
)
# variables that may differ between forks, because they are read when they are used, not on import
FREE = ("COLUMNS", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST", "PWD")
FREE += ("RANK", "TENSORBOARD_LOGGING_DIR", "WANDB_DIR", "WANDB_MODE", "WANDB_PROJECT", "WANDB_SILENT")
FREE += ("WORLD_SIZE",)
FREE += ("HOME",)  # libraries read it on import to find the cache of the Hub, which nothing here uses
FREE += ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS")  # of Keras and its backends, which are not preloaded


# the server


def serve(control: socket.socket) -> None:
    """Fork a child for every request until the other side closes the socket; returns in each child."""
    wake_up, woken = socket.socketpair()
    for end in (wake_up, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, wake_up], [], [])
        if wake_up in ready:
            wake_up.recv(4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                report = running.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(report, f"{status}\n".encode())
                os.close(report)
        if control in ready:
            size, descriptors, _, _ = socket.recv_fds(control, 8, 4)
            if not size:
                sys.exit()
            request = json.loads(received(control, int.from_bytes(size, "big")))
            if pid := os.fork():
                for descriptor in descriptors[:3]:
                    os.close(descriptor)
                running[pid] = descriptors[3]
                os.write(descriptors[3], f"{pid}\n".encode())
                continue
            signal.set_wakeup_fd(-1)
            for each in (control, wake_up, woken):
                each.close()
            for report in (*running.values(), descriptors[3]):
                os.close(report)
            become(request, descriptors[:3])
            return


def received(control: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        parts.append(control.recv(size))
        size -= len(parts[-1])
    return b"".join(parts)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Turn a fork into the requested process."""
    import numpy as np
    import torch

    if request["session"]:
        os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores_interrupts"] else signal.default_int_handler)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # new random seeds, as in a new process, so that tests notice a missing seed; `random` reseeds itself on fork
    np.random.seed()
    torch.seed()
    sys.path[0] = "" if request["kind"] == "-c" else request["cwd"]
    sys.argv = [request["kind"], *request["arguments"]]


def main(control: socket.socket) -> None:
    """Import everything and serve; in a fork, run the command and exit as the interpreter does."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("the server has several threads: a fork could hang")
    gc.collect()
    gc.freeze()  # keeps the loaded modules in memory shared between the forks
    control.sendall(b"!")
    serve(control)
    code = run_command(*sys.argv[:2])
    threading._shutdown()  # type: ignore[attr-defined] — waits for threads, as Python does on exit
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # a regular exit would spend seconds on destroying the loaded modules


def run_command(kind: str, what: str) -> int:
    """Run `python -c CODE …` or `python -m MODULE …`; returns the exit code."""
    import runpy

    del sys.argv[0 if kind == "-m" else 1]
    try:
        if kind == "-c":
            sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.modules.pop(what, None)  # a module that runs as a script is loaded again
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(error.__traceback__.tb_next), error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


# the tests


class Server:
    """The server process of this session."""

    def __init__(self, environment: dict[str, str]):
        ours, theirs = socket.socketpair()
        self.control, self.lock, self.environment = ours, threading.Lock(), fixed(environment)
        code = f"import socket, fork_server; fork_server.main(socket.socket(fileno={theirs.fileno()}))"
        paths = [os.path.dirname(__file__), *filter(None, [environment.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            # the allocator of Arrow would start a thread
            env={
                **environment,
                **{"PYTHONPATH": os.pathsep.join(paths), "JE_ARROW_MALLOC_CONF": "background_thread:false"},
            },
            pass_fds=[theirs.fileno()],
            # pipes, like the streams of the forks, because Python caches properties of its streams
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach the tests only
        )
        theirs.close()
        if ours.recv(1) != b"!":
            raise RuntimeError(f"the fork server did not start: {self.process.communicate()[1].decode()}")
        atexit.register(self.close)

    def close(self) -> None:
        self.control.close()
        self.process.communicate()

    def fork(self, request: dict[str, Any], streams: list[int]) -> tuple[int, int]:
        """Returns the process id, and a pipe from which the exit status can be read."""
        reading, writing = os.pipe()
        body = json.dumps(request).encode()
        with self.lock:  # of the threads that start processes
            socket.send_fds(self.control, [len(body).to_bytes(8, "big")], [*streams, writing])
            self.control.sendall(body)
        os.close(writing)
        return int(read_line(reading)), reading


def read_line(pipe: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(pipe, 1)):
            raise RuntimeError("the fork server has exited")
        line += byte
    return line


def fixed(environment: dict[str, str]) -> dict[str, str]:
    """The environment variables that must be the same in the server and in a fork."""
    return {name: value for name, value in environment.items() if name not in FREE}


_servers: list[Server] = []


def server_for(command: list[str], environment: dict[str, str]) -> Server | None:
    """The server if it can run this command, else None."""
    if os.environ.get("LINFORMER_TESTS_FORK") == "0" or not sys.platform.startswith("linux"):
        return None
    if command[0] != sys.executable or command[1] not in ("-m", "-c"):
        return None
    if not _servers:
        _servers.append(Server(environment))
    return _servers[0] if fixed(environment) == _servers[0].environment else None


class Forked(subprocess.Popen):
    """A process forked by the server, which is its parent and reports its exit status."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        pipes, (*_, start_new_session, _) = rest[3:9], rest
        own = dict(zip((0, 1, 2), (pipes[0], pipes[3], pipes[5]), strict=True))
        request = {
            "kind": args[1],
            "arguments": [str(each) for each in args[2:]],
            "cwd": os.path.abspath(cwd or os.getcwd()),
            "env": dict(env),
            "session": bool(start_new_session),
            "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }
        try:
            streams = [place if stream == -1 else stream for place, stream in own.items()]
            self.pid, self._report = _servers[0].fork(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags):  # type: ignore[override]
        if wait_flags == os.WNOHANG and not select.select([self._report], [], [], 0)[0]:
            return 0, 0
        status = int(read_line(self._report))
        os.close(self._report)
        return self.pid, status

    def _internal_poll(self, *_, **__):  # type: ignore[override]
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def Popen(command: list[Any], *, env: dict[str, str], real: bool = False, **options: Any) -> subprocess.Popen:
    """`subprocess.Popen` as a fork if possible; `real` forces an ordinary process."""
    command = [str(each) for each in command]
    kind = subprocess.Popen if real or server_for(command, env) is None else Forked
    return kind(command, env=env, **options)


def run(
    command: list[Any], *, input: str | None = None, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess:
    """`subprocess.run` with its output captured."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    if input is None:
        del pipes["stdin"]
    with Popen(command, **pipes, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
