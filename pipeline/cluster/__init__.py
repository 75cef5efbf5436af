"""Let the ranks of a job meet, talk to each other and decide together; detect faults.

================== ===================================================================
``environment.py`` what the launcher or Slurm says about this process; their signals to stop
``rendezvous.py``  join the others: device, key-value store, torch.distributed, DeepSpeed
``world.py``       this process's place; collectives on tensors and on plain data
``host.py``        this machine: GPU driver, CPU cores, allocator, network interface
``nccl.py``        let NCCL report faults to the heartbeat instead of ending the process
``agreement.py``   collective decisions: raise, stop or publish on all ranks alike
``heartbeat.py``   heartbeats between the ranks; all exit when one is lost
``beats.py``       what a heartbeat says, in the job's key-value store
``lost_ranks.py``  the failure detector: which rank is lost, and where it was last seen
================== ===================================================================

Elsewhere: checkpoints in ``pipeline.checkpoint``; non-finite gradients and requeueing in ``pipeline.training``.
"""
