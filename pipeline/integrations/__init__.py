"""This project's models inside of other libraries.

========  =========================================================
``timm``  registers the models with timm, under this project's names
========  =========================================================
"""
