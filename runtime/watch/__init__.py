"""The memory of each step compared with the prediction: the census, the meter's schedule, and the holders of an
excess.
"""
