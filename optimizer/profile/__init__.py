"""A model's work, traced once per distinct block: ops with FLOPs and bytes, storages with lifetimes. trace.py alone
needs torch."""
