"""The ranks of a job: how they meet, talk to each other and decide together.

================= ====================================================================
``world.py``      rank, world size and device of this process; joining the others
``rendezvous.py`` the process group and the key-value store behind it
``nccl.py``       NCCL reports faults to the heartbeat in place of ending the process
``interface.py``  gloo's network interface where a host's name resolves to loopback
``signing.py``    the job's secret, and HMAC signatures made with it
``exchange.py``   all-gather of plain data as JSON
``agreement.py``  collective decisions: raise, stop or publish on all ranks alike
``driver.py``     whether the NVIDIA driver suits the builds of PyTorch and DALI
``affinity.py``   the CPU cores beside a rank's GPU
================= ====================================================================
"""
