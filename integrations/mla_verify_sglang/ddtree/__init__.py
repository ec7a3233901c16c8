"""DDTREE: a draft tree from the marginals of a DFlash drafter, verified in one pass (arXiv 2604.12989).

``build`` makes the tree, ``accept`` walks it, ``commit`` moves the accepted K/V rows to the front; ``kernels`` has
their Triton forms. ``budget`` chooses how many nodes a step verifies, by what ``meter`` saw. ``worker`` runs them in
SGLang, ``compat`` is where its releases differ, ``algorithm`` makes them a speculative algorithm there. Importing this
package loads none of them.
"""
