"""The baselines of evals/frontier.py, each restated for one clip in evals/lockstep.py.

Every one is a controller by the production protocol, or a schedule of fewer steps; those that look into the
transformer take a `BlockCall`. tests/evals/test_peers.py holds them to the libraries' own.
"""

from evals.peers.catalog import peers
from evals.peers.spec import PeerSpec

__all__ = ["PeerSpec", "peers"]
