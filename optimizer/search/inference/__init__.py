"""The best plan of a batch generation, as the modules beside this package find training's. Begin with ``search.py``."""
