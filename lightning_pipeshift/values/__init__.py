"""The core: tensors of a step that one stage owns, and how they reach the stages that use them.

Every stage runs the whole of the user's step. What runs, and what is sent, follows from four rules:

1. A layer runs at the stage that owns it. Its results are values of that stage.
2. An operation between layers runs on every stage if its inputs are common, and otherwise at one
   stage: where it writes, or else at the last of the stages that own what it uses.
3. Where a value is not, a placeholder stands for it (:class:`~.value.Value`). It answers questions
   about shape and type by itself. What needs the numbers gets them from the owner: a layer or an
   operation at another stage, by a message; Python (``item()``, ``if``, ``print``), by a message to
   every stage.
4. All stages keep the same account of every value (:class:`~.account.Account`), from nothing but
   the program that all of them run. So the sender and the receiver of a message both know of it
   without asking, and a message that does not fit tells that the programs differ.
"""
