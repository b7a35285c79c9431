"""Tests marked gpu run where there is a CUDA device; elsewhere they are left out, not skipped: each has a twin on the CPU."""

_left_out = []


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    items[:] = [item for item in items if item not in marked]
    _left_out.extend(marked)
    config.hook.pytest_deselected(items=marked)


def pytest_report_collectionfinish():
    if not _left_out:
        return []
    return f"no CUDA device: {len(_left_out)} tests marked gpu are left out; each has a twin on the CPU (CONTRIBUTING.md)"
