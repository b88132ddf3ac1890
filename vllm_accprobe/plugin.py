"""What vLLM calls: two entry points, and nothing else of the house is imported while the probe is off.

The problem: vLLM loads plugins in every process, at two moments. The platform group comes early, half-way through
``import vllm.config``, when nothing can be patched yet but environment names can still be announced before vLLM
complains about unknown ones. The general group comes later, in the front end while the engine's arguments are built,
in the engine core and in every worker. The idea: ``platform`` only announces names and never claims the platform;
``register`` does the work: checks the configuration, fixes the dump's directory for all processes, makes the engine
eager, and patches the one method after which a worker's model runner exists.
Not here: who listens to that runner, and how (capture/vllm/runner.py).
"""

from __future__ import annotations

import os
import sys
from typing import Any

_SWITCHES = (
    "VLLM_ACCPROBE", "VLLM_ACCPROBE_ERRCHECK", "VLLM_ACCPROBE_FORCE", "VLLM_ACCPROBE_STATES", "VLLM_ACCPROBE_HEAL",
)  # fmt: skip
_OFF = ("", "0", "false", "no", "off")
_patched: set[str] = set()


def _wanted() -> bool:
    """Whether the probe is on, or errcheck, forcing, healing or the ledger of states, which need no probe."""
    return any(os.environ.get(name, "").strip().lower() not in _OFF for name in _SWITCHES)


def platform() -> None:
    """Entry point of group ``vllm.platform_plugins``: announces our environment names, claims no platform."""
    if not _wanted():
        return
    _announce()


def register() -> None:
    """Entry point of group ``vllm.general_plugins``. Returns at once while none of _SWITCHES is set.

    Raises:
        SystemExit: a setting is wrong or the dump directory cannot be used; the line on stderr says which.
    """
    if not _wanted():
        return
    from vllm_accprobe.config import ConfigError, ProbeConfig

    _announce()
    _leave_scripts()
    try:
        config = ProbeConfig.from_env()
        _check_patches(config)
        watches = config.enabled or config.errcheck or config.ledger
        if watches or (config.heal and config.dir):
            _claim_directory(config)
        if config.force_dir:
            _settle_steps(config.force_dir)
    except ConfigError as error:
        # vLLM would print a traceback for any other exception; a start that is refused on purpose is one line.
        sys.stderr.write(f"accprobe: {error}\n")
        sys.stderr.flush()
        raise SystemExit(2) from None
    if (watches or config.heal) and not config.graphs:
        _patch_engine_args()
    _tell_replicas()
    if config.enabled:
        _patch_scheduler()
        _say_old_words()
    _patch_workers()
    if watches or config.heal:
        _patch_shutdown()
        _patch_worker_end()


def _leave_scripts() -> None:
    """Takes errcheck's watch of plain scripts (capture/errcheck/startup/) off: here its observer watches, and nothing
    of ours may stand where vLLM calls and compiles modules."""
    torch_module = sys.modules.get("torch.nn.modules.module")
    modules: Any = getattr(torch_module, "Module", None)
    original = modules and getattr(modules.__call__, "__accprobe_original__", None)
    if original is not None:
        modules.__call__ = original


def _say_old_words() -> None:
    from vllm_accprobe.capture.ops.begin_end import advice

    if (line := advice(os.environ)) and "words" not in _patched:
        _patched.add("words")
        _say(line)


def _say(message: str) -> None:
    from vllm_accprobe.capture.core import say

    say(message)


def _announce() -> None:
    from vllm_accprobe.config import ENV, PREFIX, TAP_SET, environment_names

    envs = sys.modules.get("vllm.envs")
    table = getattr(envs, "environment_variables", None)
    if not isinstance(table, dict):
        return
    # vLLM hashes the values of all known names into its compile cache. Only those that change what a compiled graph
    # contains may do so: a new dump directory must not recompile the model. With taps in the graph their key says all
    # (it is known when the model is loaded), and which of them are chosen is no matter of the graph.
    hashed = (ENV, PREFIX + "GRAPHS", PREFIX + "PATCHES", TAP_SET)
    modules = PREFIX + "MODULES"
    table.setdefault(modules, lambda: None if os.environ.get(TAP_SET) else os.environ.get(modules))
    for name in environment_names():
        if name in hashed:
            table.setdefault(name, lambda name=name: os.environ.get(name))
        else:
            table.setdefault(name, lambda: None)


def _check_patches(config: Any) -> None:
    """Refuses names and files that are no patches. Whether one fits this vLLM is seen, and said, in the workers."""
    if not config.patches:
        return
    from vllm_accprobe.config import PREFIX, ConfigError
    from vllm_accprobe.patching.schema import PatchError, choose

    try:
        choose(config.patches)
    except PatchError as error:
        raise ConfigError(f"{PREFIX}PATCHES: {error}") from None


def _claim_directory(config: Any) -> None:
    """In the first process: settles the dump's absolute path for all processes, and checks that it can be written."""
    from vllm_accprobe.config import PREFIX, RUN_ID, ConfigError, default_dir

    if os.environ.get(RUN_ID):
        return
    named = bool(config.dir)
    path = os.path.abspath(config.dir or default_dir())
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.path.exists(os.path.join(path, "run.json")):
            raise ConfigError(f"{PREFIX}DIR={path} already holds a dump; name another directory, or remove it")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{PREFIX}DIR={path} cannot be written; name a directory that this user may write")
    except OSError as error:
        what = f"{PREFIX}DIR={path}" if named else f"the default dump directory {path}"
        raise ConfigError(f"{what}: {error.strerror or error}; name a directory that can be written") from None
    os.environ[PREFIX + "DIR"] = path
    os.environ[RUN_ID] = f"{os.getpid():x}-{os.urandom(6).hex()}"
    if config.enabled:
        _say(f"on; the dump goes to {path}")


def _settle_steps(directory: str) -> None:
    """Makes the directory of the steps' lines, under one name for all processes."""
    from vllm_accprobe.config import PREFIX, ConfigError

    path = os.path.abspath(directory)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(None, "it cannot be written")
    except OSError as error:
        raise ConfigError(f"{PREFIX}FORCE={path}: {error.strerror or error}; name another directory, or 1") from None
    os.environ[PREFIX + "FORCE"] = path


def _patch_engine_args() -> None:
    """Makes the engine eager: compiled and captured graphs run no Python, and a tap is Python."""
    if "args" in _patched:
        return
    try:
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_engine_config
    except (ImportError, AttributeError) as error:
        _say(f"this vLLM has no EngineArgs.create_engine_config ({error}); start it with --enforce-eager yourself")
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_accprobe.capture.vllm.vllm_compat import make_eager
        from vllm_accprobe.config import ProbeConfig

        if ProbeConfig.from_env().graphs:  # a further engine of this process, which may keep its graphs
            return original(self, *args, **kwargs)
        changed = make_eager(self)
        if changed:
            settings = ", ".join(what for what in changed if what != "enforce_eager")
            _say(
                "the engine is made eager so that every module is seen (VLLM_ACCPROBE_GRAPHS=1 leaves it as configured)"
                + (f"; it got {settings}" if settings else "")
            )
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
    _patched.add("args")


def _tell_replicas() -> None:
    """Lets the workers know how many data-parallel replicas there are: vLLM tells an engine of a dense model that it is
    the only one, and then nobody would miss a replica's rank in the dump."""
    if "replicas" in _patched:
        return
    try:
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_engine_config
    except (ImportError, AttributeError):
        return  # said already, or left as configured

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_accprobe.config import REPLICAS

        made = original(self, *args, **kwargs)
        os.environ[REPLICAS] = str(getattr(getattr(made, "parallel_config", None), "data_parallel_size", 1) or 1)
        return made

    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
    _patched.add("replicas")


def _patch_scheduler() -> None:
    """Lets the process that makes the steps read the control file, for all ranks (capture/arming.py)."""
    from vllm_accprobe.capture.arming import patch_engines

    if "scheduler" not in _patched and patch_engines():
        _patched.add("scheduler")


def _patch_shutdown() -> None:
    """Gives engine processes time to close their dumps.

    By default (shutdown_timeout 0) newer front ends send SIGTERM and, without waiting, SIGKILL to the engine; those
    before 0.18 have no such option, and kill it after five seconds.
    """
    if "shutdown" in _patched:
        return
    try:
        from vllm.v1.engine import utils

        original = utils.shutdown
    except (ImportError, AttributeError):
        return  # an engine in this process, or another vLLM: it waits as long as it does

    def shutdown(procs: Any, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        from vllm_accprobe.dump.journal_writer import end

        end(procs, float(timeout or 0.0), os.environ.get("VLLM_ACCPROBE_DIR", ""))
        if timeout is not None:
            kwargs["timeout"] = 0.0
        return original(procs, *args, **kwargs)

    utils.shutdown = shutdown
    _patched.add("shutdown")


def _patch_worker_end() -> None:
    """Gives workers that are processes of their own the same time: the engine kills them nine seconds after they are to
    end (0.32: 5 s of VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, 4 s after SIGTERM)."""
    if "worker end" in _patched:
        return
    try:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        original = MultiprocExecutor._ensure_worker_termination
    except (ImportError, AttributeError):
        return
    static = isinstance(vars(MultiprocExecutor).get(original.__name__), staticmethod)

    def ensure(*args: Any, **kwargs: Any) -> Any:
        try:
            from vllm_accprobe.dump.journal_writer import settle

            procs = (*args, *kwargs.values())[-1]
            settle(procs, os.environ.get("VLLM_ACCPROBE_DIR", ""))
        except Exception as error:
            _say(f"did not wait for the workers' dumps ({type(error).__name__}: {error})")
        return original(*args, **kwargs)

    setattr(MultiprocExecutor, original.__name__, staticmethod(ensure) if static else ensure)
    _patched.add("worker end")


def _patch_workers() -> None:
    if "workers" in _patched:
        return
    wrapper_class = None
    for module in ("vllm.v1.worker.worker_base", "vllm.worker.worker_base"):
        try:
            imported = __import__(module, fromlist=["WorkerWrapperBase"])
            wrapper_class = imported.WorkerWrapperBase
            break
        except (ImportError, AttributeError):
            continue
    if wrapper_class is None or not hasattr(wrapper_class, "init_device"):
        _say("this vLLM has no WorkerWrapperBase.init_device: NOTHING will be captured; run `accprobe doctor`")
        return
    init_device = wrapper_class.init_device
    shutdown = getattr(wrapper_class, "shutdown", None)

    def probed_init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_device(self, *args, **kwargs)
        try:
            from vllm_accprobe.config import ProbeConfig

            config = ProbeConfig.from_env()
            from vllm_accprobe.capture.vllm.runner import observe

            if config.heal:  # first, so that its taps lie inside all others
                from vllm_accprobe.heal.healing import HealObserver

                observe(self, HealObserver)
            if config.enabled:
                from vllm_accprobe.capture.vllm.capturing import CaptureObserver

                observe(self, CaptureObserver)
            if config.errcheck:
                from vllm_accprobe.capture.errcheck.observer import ErrcheckObserver

                observe(self, ErrcheckObserver)
            if config.ledger:
                from vllm_accprobe.capture.states.observer import StatesObserver

                observe(self, StatesObserver)
            if config.force:
                from vllm_accprobe.capture.teacher_forcing import ForcingObserver

                observe(self, ForcingObserver)
        except Exception as error:  # a broken installation of the probe must not take the server with it
            _say(f"cannot start ({type(error).__name__}: {error}): NOTHING will be captured; serving goes on")
        return result

    def probed_shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = self.__dict__.get("_accprobe")  # capture/vllm/runner.py puts it there
        if adapter is not None:
            adapter.close("shutdown")
        return shutdown(self, *args, **kwargs)  # type: ignore[misc]

    wrapper_class.init_device = probed_init_device
    if shutdown is not None:
        wrapper_class.shutdown = probed_shutdown
    _patched.add("workers")
