"""Our own decoder: one configurable language model whose attention, norms and sharing of parameters are options.

``config.py`` is torch-free and says what may be asked for; ``attention.py``, ``blocks.py`` and ``model.py`` are the module.
"""
