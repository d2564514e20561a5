
// Hands each cell of a finished tile to the kernel's store_cell(row, col, value).
fn store_tile(row0: u32, col0: u32, thread: u32) {
    for (var c = 0u; c < COLS; c++) {
        let col = col0 + nth_col(thread, c);
        for (var g = 0u; g < ROW_GROUPS; g++) {
            let row = row0 + first_row(thread) + 4u * g;
            let value = sums[c * ROW_GROUPS + g];
            store_cell(row, col, value.x);
            store_cell(row + 1u, col, value.y);
            store_cell(row + 2u, col, value.z);
            store_cell(row + 3u, col, value.w);
        }
    }
}
