"""What prefill and decode workers share: assembling an engine, its transfers and its place in the cluster."""
