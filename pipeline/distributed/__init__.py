"""Let the ranks of a job meet, talk to each other and decide together.

================== ===================================================================
``environment.py`` what the launcher or Slurm says about this process
``world.py``       join the others: device, torch.distributed, DeepSpeed
``rendezvous.py``  the process group and the key-value store behind it
``host.py``        this machine: GPU driver, CPU cores, allocator, network interface
``nccl.py``        let NCCL report faults to the heartbeat instead of ending the process
``exchange.py``    gather and broadcast plain data as JSON
``agreement.py``   collective decisions: raise, stop or publish on all ranks alike
================== ===================================================================
"""
