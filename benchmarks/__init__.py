"Benchmarks: not part of the package; bench, peers and workloads are exported from the notebooks beside them"
