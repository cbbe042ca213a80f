"""Who carries out a job: this process, or a spawned child that a crashing candidate may kill."""
