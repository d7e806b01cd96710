"""Hosts with an sshd on this machine: each has its own network, name and hosts file."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rendering import ran
from slurm.jobs import PYTHON, until

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
SEARCHED = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
SEARCHED |= {"ip": "iproute2", "nsenter": "util-linux"}
# `login` starts the runs; `apart` has a copy of the project's folder, and shares nothing.
NAMES = ("login", "one", "two", "apart")


def missing() -> str | None:
    """Why no host can be started here; None if they can."""
    absent = [name for name in SEARCHED if not shutil.which(name, path=PATH)]
    if absent:
        packages = " ".join(sorted({SEARCHED[name] for name in absent}))
        return f"{', '.join(absent)} missing: apt-get install {packages}"
    if os.getuid() != 0:
        return "network namespaces need root"
    return None if PYTHON.exists() else f"there is no {PYTHON} (PROJECT_PYTHON): make demo"


def run(*command: str | Path) -> str:
    """Return what a command prints; it must succeed."""
    done = ran(command, env=os.environ | {"PATH": PATH})
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@dataclass
class Hosts:
    """Hosts on a bridge of their own, and the keys with which `login` reaches the others."""

    folder: Path
    project: Path

    def __post_init__(self) -> None:
        self._id = hashlib.sha256(str(self.folder).encode()).hexdigest()[:6]
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Create the network, and start sshd on all hosts but `login`."""
        (self.folder / "home").mkdir(parents=True)
        # 198.18.0.0/15 is reserved for network tests; a cluster of slurm/cluster.sh may use others.
        subnet = f"198.19.{int(self._id[:2], 16)}"
        bridge = f"ssh-{self._id}"
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        lines = ["127.0.0.1 localhost"]
        for number, name in enumerate(NAMES, 1):
            inside, outer = self._namespace(name), f"sh{self._id}-{number}"
            run("ip", "netns", "add", inside)
            peer = ("peer", "name", "eth0", "netns", inside)
            run("ip", "link", "add", outer, "type", "veth", *peer)
            run("ip", "link", "set", outer, "master", bridge, "up")
            run("ip", "-n", inside, "link", "set", "lo", "up")
            run("ip", "-n", inside, "link", "set", "eth0", "up")
            run("ip", "-n", inside, "address", "add", f"{subnet}.{number}/24", "dev", "eth0")
            lines.append(f"{subnet}.{number} {name}")
        (self.folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name in ("host_key", "user_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name)
        self._write_settings()
        shutil.copytree(self.project, self.folder / "copy")
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in NAMES[1:]:
            self.start(name)

    def _write_settings(self) -> None:
        key = (self.folder / "host_key.pub").read_text(encoding="utf-8")
        names = ",".join(NAMES)
        settings = {
            "known_hosts": f"{names} {key}",
            # An empty home: this machine's own .bashrc may print something, and take time.
            "sshd_config": f"HostKey {self.folder}/host_key\nSetEnv HOME={self.folder}/home\n"
            f"AuthorizedKeysFile {self.folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n",
            "ssh_config": f"Host *\nIdentityFile {self.folder}/user_key\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {self.folder}/known_hosts\nGlobalKnownHostsFile /dev/null\n",
        }
        for name, text in settings.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def _namespace(self, name: str) -> str:
        return f"ssh-{self._id}-{name}"

    def inside(self, name: str, *command: str) -> list[str]:
        """Return the command that runs another one on a host."""
        bind = 'mount --bind "$2" "$3"; ' if name == "apart" else ""
        script = f'hostname "$1"; mount --bind "$4" /etc/hosts; {bind}cd /; shift 4; exec "$@"'
        enter = ("nsenter", f"--net=/run/netns/{self._namespace(name)}", "unshare", "--uts")
        copy = (str(self.folder / "copy"), str(self.project), str(self.folder / "hosts"))
        return [*enter, "--mount", "bash", "-ec", script, "bash", name, *copy, *command]

    def start(self, name: str) -> None:
        """Start a host's sshd, and wait until it answers."""
        server = shutil.which("sshd", path=PATH)
        assert server is not None
        command = self.inside(name, server, "-D", "-e", "-f", str(self.folder / "sshd_config"))
        with (self.folder / f"{name}.log").open("ab") as log:
            self._servers[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": PATH},  # a login's variables are not those of this process
            )
        reach = ("ssh", "-F", str(self.folder / "ssh_config"), "-o", "BatchMode=yes", name, "true")

        def answers() -> bool:
            done = subprocess.run(
                self.inside("login", *reach), capture_output=True, timeout=600, check=False
            )
            return done.returncode == 0

        until(answers, (self.folder / f"{name}.log").read_text)

    def processes(self, name: str) -> set[int]:
        """Return the processes on a host, without its sshd."""
        pids = {int(word) for word in run("ip", "netns", "pids", self._namespace(name)).split()}
        return pids - {server.pid for server in self._servers.values()}

    def kill(self, name: str) -> None:
        """Kill a host: its sshd and all that runs there."""
        server = self._servers.pop(name)
        server.kill()
        server.wait(timeout=600)
        until(lambda: not self._kill_all(name), lambda: f"processes of {name} do not end")

    def _kill_all(self, name: str) -> set[int]:
        for pid in self.processes(name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return self.processes(name)

    def down(self) -> None:
        """Stop and remove all hosts, and the bridge."""
        for name in list(self._servers):
            self.kill(name)
        for name in NAMES:
            until(lambda name=name: not self._kill_all(name), lambda: "processes do not end")  # type: ignore[misc]
            run("ip", "netns", "delete", self._namespace(name))
        run("ip", "link", "delete", f"ssh-{self._id}")

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the variables of a command on `login`."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "PYTEST_", "TRAINER_"))
        }
        variables = {"VENV": str(PYTHON.parent.parent), "OMP_NUM_THREADS": "1"}
        return inherited | variables | {"SSH_OPTIONS": f"-F {self.folder}/ssh_config"} | extra
