"""DDTREE: a draft tree from the marginals of a DFlash drafter, verified in one pass (arXiv 2604.12989).

``build`` makes the tree, ``accept`` walks it, ``commit`` moves the accepted K/V rows to the front; ``kernels``
has their Triton forms. ``worker`` runs them in SGLang, ``algorithm`` makes them a speculative algorithm there.
Importing this package loads none of them.
"""
