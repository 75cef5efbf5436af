"""How rank 0 reads the heartbeats of thousands of ranks: in groups, whose leaders have read them before.

To read a heartbeat, that is to check its signature and parse it, takes tens of microseconds of Python, in which the training on
rank 0 waits for the interpreter's lock. So from a second group on, the first rank of each group of ``GROUP`` reads its members'
heartbeats and writes them as one digest, and rank 0 reads its own group and the digests.

A leader is a convenience, not a link that must hold: every rank still writes its own heartbeat, and rank 0 reads directly whoever
is not in a digest, and the whole group once a digest has not changed for ``_STALE`` readings. So no rank is thought lost because
its leader is.
"""

from __future__ import annotations

from pipeline.faults.lost_ranks import Digest, Sign, Status
from pipeline.faults.notices import Notices

GROUP = 64  # ranks: about as many digests as members at 4,096 ranks
_STALE = 2  # readings; with any more, the members of a lost leader's group would be silent for long themselves


class Relay:
    """Reads all heartbeats on rank 0, or those of a group on its leader.

    Args:
        notices: of this rank.
        rank, size: of this process, and the world size.
        group: ranks in a group; ``GROUP`` if not given.
    """

    def __init__(self, notices: Notices, rank: int, size: int, group: int | None = None) -> None:
        group = group or GROUP
        self._notices, self._rank, self._size = notices, rank, size
        self._members = {first: range(first, min(first + group, size)) for first in range(0, size, group)}
        self._beats = dict.fromkeys([*self._members][1:], 0)  # leader -> beat of its last digest
        self._unchanged = dict.fromkeys(self._beats, 0)  # leader -> readings since then

    def read(self) -> list[Sign]:
        """Rank 0: the newest heartbeat of each rank.

        Raises:
            RuntimeError: the store does not answer.
        """
        directly = [*self._members[0]]  # its own key too, to detect a forgery there
        for leader, digest in zip([*self._beats], self._notices.read_digests([*self._beats]), strict=True):
            self._unchanged[leader] = self._unchanged[leader] + 1 if digest.beat == self._beats[leader] else 0
            self._beats[leader] = digest.beat
            stale = digest.beat == 0 or self._unchanged[leader] >= _STALE
            relayed = set() if stale else {sign.rank for sign in digest.signs}
            directly += [rank for rank in self._members[leader] if rank not in relayed]
        self._notices.read(directly)
        return self._notices.known(range(self._size))

    def pass_on(self, beat: int) -> None:
        """A group's leader: read the members' heartbeats and write them as a digest. Does nothing on other ranks.

        Args:
            beat: of this rank; counts up.

        Raises:
            RuntimeError: the store does not answer.
        """
        if self._rank not in self._beats:
            return
        signs = self._notices.read_members(self._members[self._rank])
        # Errors are long, and none has written yet who is at beat 0: rank 0 reads these itself.
        plain = tuple(sign for sign in signs if sign.beat and sign.status is not Status.ENDED and not sign.words)
        self._notices.write_digest(Digest(self._rank, beat, plain))
