"""Rearranges the K/V pool of a running SGLang server so that a request's slots lie side by side.

``plan`` says which rows go where (pure), ``move`` moves them, ``holders`` tells everybody who holds slot ids,
``defragmenter`` does all of it or nothing, ``serving`` calls it where no step is running. Importing this package
loads none of them.
"""
