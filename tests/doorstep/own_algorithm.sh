# page docs/own-algorithm.md
# write method.py my_flow.py
python -m my_flow tiny steps=2 'algorithm.selection=[{kind: best_of, best: 1}]' \
    algorithm.advantage.kind=function algorithm.advantage.path=method.py:centred \
    algorithm.loss.kind=function algorithm.loss.path=method.py:quadratic
python -m my_flow --resume RUN steps=3
