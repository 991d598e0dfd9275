"""The state machine of an agent: requests and the time in, what its host is to do out.

Law: pure. No request is carried out before `AgentHello`, and none after the agent has decided to leave.
It leaves when its launcher says so, falls silent, or sends what is not a request. Silence counts
only while this host itself was running.
"""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.messages import PeerSilence

TICK_S = 1.0
"""The longest time between two ticks of an agent that is not late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcesses:
    """End all processes, then exit.

    Attributes:
        status: the exit status.
        reason: a sentence; empty where the launcher has ended the agent.
    """

    status: int
    reason: str = ""


Action = m.Report | m.Request | EndProcesses
"""Send a report; carry out a request, which is legal now (`AgentHello`: answer with `AgentWelcome`);
or end.
"""


class AgentState:
    """An agent.

    Args:
        version: of its Poseidon.
        hello_s: how long the launcher may take to send `AgentHello`.
        now_s: the time, by any steady clock.
        launcher: the launcher in messages.
    """

    def __init__(
        self, version: str, hello_s: float, now_s: float, launcher: str = "the launcher"
    ) -> None:
        self._version = version
        self._launcher = launcher
        self._silence_s = hello_s
        self._silence = PeerSilence(TICK_S, now_s)
        self.greeted = False
        """Whether the launcher has sent `AgentHello`."""
        self._left = False
        self._started: set[int] = set()
        self.grace_s = 0.0
        """From SIGTERM to SIGKILL, when processes are ended; before `AgentHello` none run."""

    def take(self, request: m.Request, now_s: float) -> list[Action]:
        self._silence.heard_s = now_s
        if self._left or isinstance(request, m.Heartbeat):
            return []
        if isinstance(request, m.Shutdown):
            return self._leave(request.status, request.reason)
        if isinstance(request, m.AgentHello):
            return self._greet(request)
        if not self.greeted:
            return self.reject("a request before Hello")
        if isinstance(request, m.StartProcess):
            if request.id in self._started:
                why = f"process {request.id} has already been started"
                return [m.Refused(id=request.id, message=why)]
            self._started.add(request.id)
        elif isinstance(request, m.WriteLine | m.SendSignal) and request.id not in self._started:
            return []
        elif isinstance(request, m.Put | m.ReadFile) and request.id < 0:
            return self.reject(f"{type(request).__name__} with the id {request.id}")
        elif isinstance(request, m.EndAll | m.Register):
            self._started.clear()
        return [request]

    def reject(self, why: str) -> list[Action]:
        """Leave: what came is not a request of this protocol."""
        return [
            m.Refused(id=m.AGENT_ITSELF, message=why),
            *self._leave(1, f"{self._launcher} sent something that is not of this protocol: {why}"),
        ]

    def tick(self, now_s: float) -> list[Action]:
        """Note the time; called once in `TICK_S` at least."""
        if self._silence.look(now_s) <= self._silence_s or self._left:
            return []
        said = "has sent nothing for" if self.greeted else "did not answer within"
        return self._leave(1, f"{self._launcher} {said} {self._silence_s:g} s")

    def end_of_channel(self, why: str = "") -> list[Action]:
        """Leave: the channel has ended or broken."""
        lost = f"{self._launcher} is lost: {why}" if why else ""
        return self._leave(1, lost or f"the connection to {self._launcher} has ended")

    def killed_by_user(self) -> list[Action]:
        """Leave: the user has killed the job on this host."""
        # Reported before the first process ends, which would look like a loss.
        return [m.KilledByUser(), *self._leave(1, "the job was killed on this host")]

    def signaled(self, name: str) -> list[Action]:
        """Report a signal of the machine or the scheduler; before `AgentHello` there is nobody to report
        it to.
        """
        if self.greeted:
            return [m.Signaled(signal=name)]
        return self._leave(1, f"the task was ended by {name} before all others had joined")

    def _greet(self, hello: m.AgentHello) -> list[Action]:
        if (hello.protocol, hello.version) != (m.PROTOCOL, self._version):
            return self.reject(
                f"Poseidon {self._version} is installed there, and {hello.version} here; install "
                "the same version"
            )
        self.greeted = True
        self._silence_s, self.grace_s = hello.silence_s, hello.grace_s
        return [hello]

    def _leave(self, status: int, reason: str = "") -> list[Action]:
        if self._left:
            return []
        self._left = True
        return [EndProcesses(status=status, reason=reason)]
