"""What may befall a run in flight, and what follows.

================== ======================================================================
``stop_signal.py`` SIGTERM, SIGUSR1 or SIGHUP: all save and end
``heartbeat.py``   signs of life between the processes; who learns that one is lost ends
``notices.py``     where those signs stand, and which of them count
``signing.py``     the job's secret, and signatures made with it
``lost_ranks.py``  the judgement: which of them is lost, and since which step
``nonfinite.py``   a gradient that is not finite: skipped, or all that repeats the step
``restart.py``     may the job start again?
================== ======================================================================

Checkpoints are ``pipeline.checkpoint``'s; how the processes act at the same step is ``pipeline.distributed.agreement``'s.
"""
