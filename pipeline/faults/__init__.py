"""Detect faults and recover.

================== =======================================================================
``stop_signal.py`` cooperative shutdown on SIGTERM, SIGUSR1 and SIGHUP
``heartbeat.py``   heartbeats between the ranks; all exit when one is lost
``beats.py``       what a heartbeat says, in the job's key-value store
``lost_ranks.py``  the failure detector: which rank is lost, and where it was last seen
``restart.py``     whether the job script may requeue the job
================== =======================================================================

Elsewhere: checkpoints in ``pipeline.checkpoint``, non-finite gradients in ``pipeline.run.nonfinite``, and how all ranks
stop at the same step in ``pipeline.distributed.agreement``.
"""
