"""Starting and joining clusters: on this machine, by address, as Slurm jobs, by SSH, as pods."""
