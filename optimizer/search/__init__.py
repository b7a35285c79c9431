"""Finds the best plan: the few discrete settings, the choice per block inside each, baselines beside the solver, the
frontier."""
