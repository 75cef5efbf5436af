"""Weights as files and state dicts.

===================  ==============================================================
``reference_names``  load and save weights under the names of the authors' code
``transfer``         initialize from weights for other classes or another image size
``exported``         self-describing safetensors files
===================  ==============================================================
"""
