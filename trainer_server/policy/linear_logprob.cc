#include "trainer_server/policy/linear_logprob.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/torch/buffer.h"
#include "common/torch/matrix.h"
#include "common/torch/parallel.h"
#include "common/torch/vector_ops.h"

namespace tandem {
namespace {

constexpr std::int64_t kRowGrain = 4;

template <typename T>
HeadTransform<T> Transform(const LinearHead<T>& head) {
  return {.scale = static_cast<T>(head.logit_scale / head.temperature),
          .softcap = static_cast<T>(head.softcap),
          .logit_scale = static_cast<T>(head.logit_scale),
          .temperature = static_cast<T>(head.temperature)};
}

// dz/du where the logit is z.
template <typename T>
double Slope(const LinearHead<T>& head, double z) {
  const double bent = head.softcap == 0 ? 0 : z * head.temperature / head.softcap;
  return head.logit_scale / head.temperature * (1 - bent * bent);
}

// What one row has seen so far of the vocabulary: the largest logit, the target's, and over all other columns the sums of e^{z -
// top} and (z - top) e^{z - top}. The target is kept apart: beside e^0 = 1 the rest of a confident row would be rounded away.
struct OnlineSoftmax {
  double top = -std::numeric_limits<double>::infinity();
  double sum = 0;
  double shifted = 0;
  double target_logit = 0;

  // Returns the factor by which everything weighted so far shrinks.
  double Raise(double new_top) {
    if (!(new_top > top)) return 1;
    const double keep = sum == 0 ? 0 : std::exp(top - new_top);
    shifted = sum == 0 ? 0 : keep * (shifted + (top - new_top) * sum);
    sum *= keep;
    top = new_top;
    return keep;
  }

  double target_weight() const { return std::exp(target_logit - top); }
  double lse() const { return top + std::log(sum + target_weight()); }
  double logprob() const {
    const double weight = target_weight();
    return weight >= sum ? -std::log1p(sum / weight) : target_logit - lse();
  }
  double entropy() const {
    const double total = sum + target_weight();
    const double target_shifted = target_weight() == 0 ? 0 : (target_logit - top) * target_weight();
    return std::log(total) - (shifted + target_shifted) / total;
  }
};

// One tile: Z [rows, columns] <- H W_tile^T, then `row_body(row, z)` for each row, split among threads.
template <typename T, typename RowBody>
void ForTile(const LinearHead<T>& head, Matrix<const T> hidden, std::int64_t column, std::int64_t columns, T* tile,
             const RowBody& row_body) {
  const Matrix<const T> weight(head.weight + column * head.width, columns, head.width);
  Multiply(hidden, weight.Transposed(), Matrix<T>(tile, hidden.rows, columns));
  ParallelFor(hidden.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) row_body(row, tile + row * columns);
  });
}

}  // namespace

template <typename T>
LinearLogprobs LinearLogprobForward(const LinearHead<T>& head, const T* hidden, std::span<const std::int64_t> targets,
                                    T* unit_gradient) {
  const VectorOps<T>& ops = vector_ops<T>();
  const HeadTransform<T> transform = Transform(head);
  const std::int64_t num_rows = static_cast<std::int64_t>(targets.size()), width = head.width;
  const std::int64_t row_tile = std::min(head.row_tile, num_rows), vocab_tile = std::min(head.vocab_tile, head.vocab_size);
  LinearLogprobs result;
  const Buffer<T> tile(row_tile * vocab_tile), pulled(unit_gradient == nullptr ? 0 : row_tile * width);
  std::vector<OnlineSoftmax> softmax;
  for (std::int64_t first = 0; first < num_rows; first += row_tile) {
    const Matrix<const T> rows(hidden + first * width, std::min(row_tile, num_rows - first), width);
    softmax.assign(static_cast<std::size_t>(rows.rows), {});
    for (std::int64_t column = 0; column < head.vocab_size; column += vocab_tile) {
      const std::int64_t columns = std::min(vocab_tile, head.vocab_size - column);
      ForTile(head, rows, column, columns, tile.data(), [&](std::int64_t row, T* z) {
        OnlineSoftmax& state = softmax[static_cast<std::size_t>(row)];
        const double keep = state.Raise(static_cast<double>(ops.head_logits(z, columns, transform)));
        const std::int64_t target = targets[static_cast<std::size_t>(first + row)] - column;
        if (target >= 0 && target < columns) {
          state.target_logit = static_cast<double>(z[target]);
          z[target] = -std::numeric_limits<T>::infinity();
        }
        ops.exp_sums(z, columns, static_cast<T>(state.top), &state.sum, &state.shifted);
        if (unit_gradient == nullptr) return;
        ops.head_gradient(z, columns, static_cast<T>(state.top), 1, 0, transform);
        if (keep != 1 && column > 0) ops.scale(pulled.data() + row * width, width, static_cast<T>(keep));
      });
      if (unit_gradient != nullptr) {
        Multiply(Matrix<T>(tile.data(), rows.rows, columns), Matrix<const T>(head.weight + column * width, columns, width),
                 Matrix<T>(pulled.data(), rows.rows, width), 1, column == 0 ? 0 : 1);
      }
    }
    for (std::int64_t row = 0; row < rows.rows; ++row) {
      const OnlineSoftmax& state = softmax[static_cast<std::size_t>(row)];
      result.lse.push_back(state.lse());
      result.logprobs.push_back(state.logprob());
      result.entropies.push_back(state.entropy());
      if (unit_gradient == nullptr) continue;
      T* unit = unit_gradient + (first + row) * width;
      const T* target_weight = head.weight + targets[static_cast<std::size_t>(first + row)] * width;
      std::copy_n(pulled.data() + row * width, width, unit);
      ops.scale(unit, width, static_cast<T>(-1 / (state.sum + state.target_weight())));
      ops.add_scaled(unit, target_weight, width, static_cast<T>(-std::expm1(state.logprob()) * Slope(head, state.target_logit)));
    }
  }
  return result;
}

template <typename T>
void LinearLogprobBackward(const LinearHead<T>& head, const T* hidden, std::span<const std::int64_t> targets,
                           const LinearLogprobs& forward, std::span<const double> grad_logprobs,
                           std::span<const double> grad_entropies, T* grad_hidden, T* grad_weight) {
  const VectorOps<T>& ops = vector_ops<T>();
  const HeadTransform<T> transform = Transform(head);
  const std::int64_t num_rows = static_cast<std::int64_t>(targets.size()), width = head.width;
  const std::int64_t row_tile = std::min(head.row_tile, num_rows), vocab_tile = std::min(head.vocab_tile, head.vocab_size);
  const Buffer<T> tile(row_tile * vocab_tile);
  for (std::int64_t first = 0; first < num_rows; first += row_tile) {
    const Matrix<const T> rows(hidden + first * width, std::min(row_tile, num_rows - first), width);
    for (std::int64_t column = 0; column < head.vocab_size; column += vocab_tile) {
      const std::int64_t columns = std::min(vocab_tile, head.vocab_size - column);
      // dL/du_j = [-g p_j - e p_j (z_j - lse + H)] dz_j/du_j, and g more in the target's column.
      ForTile(head, rows, column, columns, tile.data(), [&](std::int64_t row, T* z) {
        const std::size_t n = static_cast<std::size_t>(first + row);
        const double g = grad_logprobs[n], e = grad_entropies.empty() ? 0 : grad_entropies[n];
        const double entropy = forward.entropies[n], logprob = forward.logprobs[n];
        ops.head_logits(z, columns, transform);
        const std::int64_t target = targets[n] - column;
        const bool has_target = target >= 0 && target < columns;
        const double target_slope = has_target ? Slope(head, static_cast<double>(z[target])) : 0;
        ops.head_gradient(z, columns, static_cast<T>(forward.lse[n]), static_cast<T>(-g - e * entropy), static_cast<T>(-e),
                          transform);
        if (has_target) {
          z[target] = static_cast<T>((-std::expm1(logprob) * g - std::exp(logprob) * e * (logprob + entropy)) * target_slope);
        }
      });
      const Matrix<const T> slopes(tile.data(), rows.rows, columns);
      Multiply(slopes, Matrix<const T>(head.weight + column * width, columns, width),
               Matrix<T>(grad_hidden + first * width, rows.rows, width), 1, column == 0 ? 0 : 1);
      if (grad_weight != nullptr)
        Multiply(slopes.Transposed(), rows, Matrix<T>(grad_weight + column * width, columns, width), 1, 1);
    }
  }
}

template LinearLogprobs LinearLogprobForward(const LinearHead<float>&, const float*, std::span<const std::int64_t>, float*);
template LinearLogprobs LinearLogprobForward(const LinearHead<double>&, const double*, std::span<const std::int64_t>, double*);
template void LinearLogprobBackward(const LinearHead<float>&, const float*, std::span<const std::int64_t>, const LinearLogprobs&,
                                    std::span<const double>, std::span<const double>, float*, float*);
template void LinearLogprobBackward(const LinearHead<double>&, const double*, std::span<const std::int64_t>,
                                    const LinearLogprobs&, std::span<const double>, std::span<const double>, double*, double*);

}  // namespace tandem
