"""What ``pooch doctor`` looks at: the machine, the software, and a workload; each check gives findings."""
